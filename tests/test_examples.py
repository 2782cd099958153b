"""Every example in a docstring runs and prints what it says; so does every Python block of the guides."""

import doctest
import importlib
import pkgutil
import re
from pathlib import Path

import pytest

import hf_kvcache

ROOT = Path(__file__).parent.parent
GUIDES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
EXTRAS = {"hf_kvcache.evaluation.harness": "lm_eval"}
"""What a module imports that is neither the core nor the extra `eval`."""
COMPILED = {"hf_kvcache.attention._rows"}
"""What lies among the modules, but is loaded by `ctypes`."""
MODULES = [
    module.name for module in pkgutil.walk_packages(hf_kvcache.__path__, "hf_kvcache.") if module.name not in COMPILED
]


def python_blocks(page: Path) -> str:
    return "\n".join(re.findall(r"^```python\n(.*?)^```", page.read_text(), flags=re.MULTILINE | re.DOTALL))


# The examples use the name of the argument that every supported transformers takes.
OLD_NAME = pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")


@OLD_NAME
@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples(name: str) -> None:
    if name in EXTRAS:
        pytest.importorskip(EXTRAS[name])
    module = importlib.import_module(name)
    examples = [test for test in doctest.DocTestFinder().find(module, name) if test.examples]
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    for example in examples:
        assert runner.run(example).failed == 0, f"{example.name} at line {example.lineno}"


@OLD_NAME
@pytest.mark.parametrize("page", [page for page in GUIDES if python_blocks(page)], ids=lambda page: page.name)
def test_guide_examples(page: Path, smollm2, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(python_blocks(page), page.name, "exec"), {"__name__": page.stem})  # noqa: S102
    assert "Error" not in capsys.readouterr().out


def test_there_are_examples() -> None:
    assert any("\n        >>> " in (hf_kvcache.PagedCache.__doc__ or "") for _ in MODULES)
    assert python_blocks(ROOT / "README.md")
