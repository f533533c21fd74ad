"""What pyproject.toml cannot say: all packages there are, and reference/ under the name it has once installed."""

from setuptools import find_packages, setup

setup(packages=[*find_packages(include=["lenvm_kernels", "lenvm_kernels.*"]), "lenvm_kernels.reference"])
