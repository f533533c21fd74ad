"""Settings that pyproject.toml cannot express: the list of packages, and the installed name of reference/."""

from setuptools import find_packages, setup

setup(packages=[*find_packages(include=["lenvm_kernels", "lenvm_kernels.*"]), "lenvm_kernels.reference"])
