"""The one part of the package that is compiled; everything else is in pyproject.toml."""

from setuptools import Extension, setup

# Optional: where there is no C compiler, or none that knows OpenMP, torch does the same, slower. The code is not linked
# with an OpenMP library of its own: it runs on the threads of torch's.
setup(
    ext_modules=[
        Extension(
            "hf_kvcache.attention._rows",
            ["hf_kvcache/attention/rows.c"],
            # Sums may be taken in another order; infinities and NaNs stay what they are.
            extra_compile_args=["-O3", "-fopenmp", "-fassociative-math", "-fno-signed-zeros", "-fno-trapping-math"],
            optional=True,
        )
    ]
)
