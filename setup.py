"""Maps kernels/ to megatron_rl.kernels; everything else is in pyproject.toml."""

from setuptools import find_packages, setup

packages = find_packages(include=["megatron_rl", "megatron_rl.*"])
kernels = ["megatron_rl.kernels", *(f"megatron_rl.kernels.{name}" for name in find_packages("kernels"))]
setup(
    packages=[*packages, *kernels, "megatron_rl.models.presets"],
    package_dir={"megatron_rl": "megatron_rl", "megatron_rl.kernels": "kernels"},
    package_data={"megatron_rl.models.presets": ["*.json"]},
)
