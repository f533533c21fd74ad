"""Recorded engine signatures, against fake packages. Each engine's tests check the real package."""

import re

import pytest

from lenvm_kernels.engines import signatures
from lenvm_kernels.engines.signatures import USED, recorded, signature_of
from tests.helpers.engine_stubs import stubs
from tools import engine_signatures as tool


def test_every_used_signature_is_recorded():
    for engine, targets in USED.items():
        assert list(targets) == sorted(set(targets)) and recorded(engine)
        assert all(sorted(version) == sorted(targets) for version in recorded(engine).values())


SOURCE = """
import dataclasses, functools

def positional(a, /, b, c=3, *more, d, e=5, **others): ...
async def keywords(a=1, *, b, c=2): ...

def wrapping(f):
    @functools.wraps(f)
    def inner(*args, **kwargs): ...
    return inner

class Outer:
    def __init__(self, anything): ...
    @wrapping
    def method(self, a, b=2): ...
    @classmethod
    def made(cls): ...

@dataclasses.dataclass(frozen=True)
class Facts:
    \"\"\"Text.\"\"\"
    first: int
    second: float = 2.0
    def method(self): ...
"""
WRITTEN = {
    "positional": "a, b, c=, *more, d, e=, **others",
    "keywords": "a=, *, b, c=",
    "Outer.__init__": "...",
    "Outer.method": "a, b=",
    "Outer.made": "",
    "Facts": "first, second=",
}


def test_signatures_in_sources_match_the_loaded_package(site):
    folder = site({"made_up/inner.py": SOURCE})
    for name, expected in WRITTEN.items():
        target = f"made_up.inner:{name}"
        assert tool.signature_in(folder, target) == signature_of(target) == expected, name
    for target in ("made_up.inner:none", "made_up.inner:Outer.none", "made_up.none:plain"):
        assert tool.signature_in(folder, target) is signature_of(target) is None


@pytest.mark.parametrize(("engine", "version"), [(engine, version) for engine in USED for version in recorded(engine)])
def test_recorded_signatures_fit(site, engine, version):
    site(stubs(engine, version))
    assert signatures.differences(engine) == {}
    signatures.check(engine)


def test_mismatches_are_named(site):
    files = stubs("vllm", "0.33.0", stage_write="index, x")
    (runner,) = (path for path in files if path.endswith("model_runner.py"))
    files[runner] = re.sub("load_model", "load_models", files[runner])
    site(files)
    message = r"does not fit this vllm, only 0.32.0, 0.33.0: .*\S+load_model is not there"
    with pytest.raises(RuntimeError, match=message) as e:
        signatures.check("vllm")
    assert "StagedWriteTensor.stage_write takes (index, x), not (index, start, x)" in str(e.value)
    assert str(e.value).count(";") == 1


def test_tool_adds_a_version(site, tmp_path, monkeypatch, capsys):
    file, versions = tmp_path / "signatures.json", recorded("vllm")
    for version in versions:
        site({f"{version}/{path}": text for path, text in stubs("vllm", version).items()})
    for module in (tool, signatures):
        monkeypatch.setattr(module, "FILE", file)
    for version in versions:
        monkeypatch.setattr("sys.argv", ["tool", "vllm", version, str(tmp_path / "site" / version)])
        tool.main()
    assert recorded("vllm") == versions
    monkeypatch.setattr("sys.argv", ["tool", "sglang", "9", str(tmp_path)])
    with pytest.raises(SystemExit):
        tool.main()
    assert f"{tmp_path} has no sglang.srt" in capsys.readouterr().err and "sglang" not in file.read_text()
