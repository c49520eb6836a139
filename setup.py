"""The part of the build that pyproject.toml can't describe: the hash chain in C. Without a compiler it is left out."""

from sysconfig import get_config_var

from setuptools import Extension, setup  # type: ignore[import-untyped]

LEAST_PYTHON = "311"
"""The binary uses the stable ABI of this version, so it serves all later ones."""

if get_config_var("Py_GIL_DISABLED"):
    setup()  # there is no stable ABI for these Pythons
else:
    setup(
        ext_modules=[
            Extension(
                "kvatlas.blocks._hash_chain",
                ["kvatlas/blocks/_hash_chain.c"],
                define_macros=[("Py_LIMITED_API", "0x030B0000")],
                py_limited_api=True,
                optional=True,
            )
        ],
        options={"bdist_wheel": {"py_limited_api": f"cp{LEAST_PYTHON}"}},
    )
