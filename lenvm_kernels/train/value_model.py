"""Trains a value model, a backbone with a value head on its last hidden states, with ``transformers.Trainer``.

The loss is the squared error of the values, averaged over all states of an optimizer step. Adapters of ``peft`` are
merged into the backbone before the value model is written.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments
from transformers.trainer_callback import ProgressCallback
from transformers.trainer_utils import get_last_checkpoint

from lenvm_kernels.evaluate.stored_answers import check_plan
from lenvm_kernels.loading.models import load_tokenizer, source_of
from lenvm_kernels.train.answers import Example, Examples
from lenvm_kernels.train.probe import StandardizedLinear, stored_tensors
from lenvm_kernels.train.settings import Fitting
from lenvm_kernels.values import LenVMConfig

ADAPTED = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
# Learning rate of the head, and share of warm-up steps.
HEAD_RATE, WARM_UP = 5e-4, 0.03
# Minimum number of states for the head's standardization.
MEASURED_STATES = 16_384
LOGGED_STEPS = 10
NO_TARGET = -100  # Trainer ignores this label


class ValueHead(nn.Module):
    """A value head that standardizes its input with ``states [N, H]``, and initially predicts ``value`` everywhere."""

    def __init__(self, states: Tensor, value: float) -> None:
        super().__init__()
        self.fc = StandardizedLinear(states, states.shape[1])
        self.summary = nn.Linear(states.shape[1], 1)
        nn.init.zeros_(self.summary.weight)
        nn.init.constant_(self.summary.bias, math.log(value / (1 - value)))

    def forward(self, states: Tensor) -> Tensor:
        """Value logits fp32 ``[...]`` of states ``[..., H]``."""
        with torch.autocast(states.device.type, enabled=False):
            return self.summary(functional.silu(self.fc(states))).squeeze(-1)


class ValueNetwork(nn.Module):
    """A backbone without output layer, and a value head."""

    def __init__(self, backbone: nn.Module, head: ValueHead) -> None:
        super().__init__()
        self.backbone, self.head = backbone, head

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
        """Value logits fp32 ``[B, L]`` after every token, for sequences padded on the right."""
        found = self.backbone(input_ids=input_ids, attention_mask=attention_mask, use_cache=False)
        return {"logits": self.head(found.last_hidden_state)}


def fit_value_model(
    how: Fitting, path: Path, training: Examples, held_out: Sequence[Examples], plan: Mapping[str, Any], output: Path
) -> tuple[dict[str, Any], list[Tensor]]:
    """Train a value model and write it to ``output / "value"``; return facts for the report, and the held-out values.

    A training resumes from ``output / "checkpoints"`` with the same ``plan``. Only the first process returns facts.
    """
    checkpoints = output / "checkpoints"
    guard = checkpoints / "plan.json"
    if guard.exists():
        check_plan(plan, json.loads(guard.read_text(encoding="utf-8")), checkpoints)
    arguments = TrainingArguments(
        output_dir=str(checkpoints),
        num_train_epochs=how.epochs,
        learning_rate=how.learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=WARM_UP,
        per_device_train_batch_size=how.batch_size,
        per_device_eval_batch_size=how.batch_size,
        gradient_accumulation_steps=how.accumulation,
        train_sampling_strategy="group_by_length",
        bf16=how.dtype == "bfloat16",
        use_cpu=how.device == "cpu",
        save_steps=how.save_steps,
        save_total_limit=1,
        logging_steps=LOGGED_STEPS,
        remove_unused_columns=False,
        label_names=["labels"],
        disable_tqdm=False,
        report_to="none",
        seed=how.seed,
    )
    torch.manual_seed(how.seed)
    dataset = [_encoded(example) for example in training]
    network = _network(how, path, dataset, arguments.device)
    trained = {f".{name}": parameter for name, parameter in network.named_parameters() if parameter.requires_grad}
    body, head = ([p for name, p in trained.items() if (".head." in name) == is_head] for is_head in (False, True))
    groups: list[dict[str, Any]] = [{"params": body}, {"params": head, "lr": HEAD_RATE}]
    trainer = Trainer(
        network,
        arguments,
        data_collator=_collated,
        train_dataset=dataset,
        compute_loss_func=_loss,
        optimizers=(torch.optim.AdamW(groups, lr=how.learning_rate, betas=(0.9, 0.98), weight_decay=0.01), None),
    )
    trainer.remove_callback(ProgressCallback)
    trainer.add_callback(StepBar)
    last = get_last_checkpoint(str(checkpoints)) if checkpoints.is_dir() else None
    if trainer.is_world_process_zero():
        checkpoints.mkdir(parents=True, exist_ok=True)
        guard.write_text(json.dumps(plan), encoding="utf-8")
    trainer.train(resume_from_checkpoint=last)
    arguments.train_sampling_strategy = "sequential"  # also applies to predictions
    values = [_predicted(trainer, examples) for examples in held_out]
    # Gloo's threads take the GIL to free tensors. If DDP frees the process group, it holds the GIL and waits for them.
    trainer.model_wrapped = network
    trainer.accelerator.end_training()
    if not trainer.is_world_process_zero():
        return {}, values
    _write(network, path, plan["gamma"], output / "value")
    shutil.rmtree(checkpoints)
    facts = {
        "steps": trainer.state.global_step,
        "mean squared error": [round(log["loss"], 6) for log in trainer.state.log_history if "loss" in log],
        "parameters": sum(parameter.numel() for parameter in trained.values()),
    }
    return facts, values


def _network(
    how: Fitting, path: Path, dataset: Sequence[Mapping[str, Tensor]], device: torch.device
) -> ValueNetwork | PeftModel:
    """The initial network, with the head standardized on the backbone's states."""
    model = AutoModelForCausalLM.from_pretrained(
        **source_of(path),
        dtype=getattr(torch, how.dtype) if how.lora_rank else torch.float32,
        attn_implementation="sdpa",
        use_safetensors=True,
    )
    if how.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    backbone = model.base_model.to(device)
    states: list[Tensor] = []
    for i in torch.randperm(len(dataset)).tolist():
        if sum(map(len, states)) >= MEASURED_STATES:
            break
        batch = {name: tensor.to(device) for name, tensor in _collated([dataset[i]]).items()}
        has_target = batch.pop("labels") != NO_TARGET
        with torch.no_grad():
            states.append(backbone(**batch, use_cache=False).last_hidden_state[has_target].float())
    labels = torch.cat([example["labels"] for example in dataset])
    head = ValueHead(torch.cat(states), float(labels[labels != NO_TARGET].mean()))
    network = ValueNetwork(backbone, head.to(device))
    if how.lora_rank == 0:
        return network
    rank = how.lora_rank
    config = LoraConfig(r=rank, lora_alpha=rank, target_modules=list(ADAPTED), modules_to_save=["head"])
    return get_peft_model(network, config)


def _encoded(example: Example) -> dict[str, Tensor]:
    """``input_ids`` and ``labels`` ``[L]`` of the prompt and of all tokens of the answer but the last."""
    ids = torch.tensor([*example.prompt, *example.answer.ids[:-1]])
    labels = torch.full(ids.shape, float(NO_TARGET))
    labels[len(ids) - len(example.targets) :] = example.targets
    return {"input_ids": ids, "labels": labels}


def _collated(rows: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    ids, labels = ([row[name] for row in rows] for name in ("input_ids", "labels"))
    return {
        "input_ids": nn.utils.rnn.pad_sequence(ids, batch_first=True),
        "attention_mask": nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in ids], batch_first=True),
        "labels": nn.utils.rnn.pad_sequence(labels, batch_first=True, padding_value=NO_TARGET),
    }


def _loss(outputs: Mapping[str, Tensor], labels: Tensor, num_items_in_batch: Tensor | None = None) -> Tensor:
    """Sum of squared errors over the number of targets of an optimizer step, or of the batch if None."""
    has_target = labels != NO_TARGET
    count = has_target.sum() if num_items_in_batch is None else num_items_in_batch
    loss = (outputs["logits"].sigmoid() - labels)[has_target].square().sum() / count
    if not loss.isfinite():
        raise ValueError(f"the loss is {loss.item()}, --learning-rate must be lower, with a new --output")
    return loss


def _predicted(trainer: Trainer, examples: Examples) -> Tensor:
    """Values fp32 ``[N]`` of the states that have a target."""
    found = trainer.predict([_encoded(example) for example in examples])  # type: ignore[arg-type]  # accepts a list
    logits, labels = torch.tensor(found.predictions), torch.tensor(found.label_ids)
    return logits[labels != NO_TARGET].sigmoid()


def _write(network: ValueNetwork | PeftModel, path: Path, gamma: float, folder: Path) -> None:
    """Write a whole value model: adapters merged, backbone in bf16, head in fp32."""
    network = network.cpu().float()  # merged in fp32 and rounded once
    if isinstance(network, PeftModel):
        network = network.merge_and_unload()
    tensors = {f"model.{name}": tensor.bfloat16() for name, tensor in network.backbone.state_dict().items()}
    folder.mkdir(exist_ok=True)
    tensors |= {f"v_head.{name}": tensor for name, tensor in stored_tensors(network.head).items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    AutoConfig.from_pretrained(**source_of(path)).save_pretrained(folder)
    load_tokenizer("BASE", path).save_pretrained(folder)
    LenVMConfig(gamma=gamma).write(folder)


class StepBar(ProgressCallback):
    """The progress bar of ``transformers``, which shows the mean squared error instead of printing it."""

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if self.training_bar is not None and "loss" in logs:
            self.training_bar.set_postfix(loss=logs["loss"], refresh=False)
