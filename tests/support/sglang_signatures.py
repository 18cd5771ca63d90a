"""What the plug-in for SGLang takes from it, read from a wheel: `python -m tests.support.sglang_signatures WHEEL > FILE`.

SGLang's packages do not import without a GPU.  FILE, JSON, has its release, and by module and name the parameters of functions,
or of a class's methods; null for other values.
"""

from __future__ import annotations

import ast
import json
import sys
import zipfile
from pathlib import Path
from typing import Any

RECORDED = Path(__file__).parents[1] / "data" / "sglang" / "signatures.json"
NAMES = {
    "sglang.srt.arg_groups.choices": ("add_quantization_method_choices",),
    "sglang.srt.distributed.utils": ("get_group_rank_size",),
    "sglang.srt.layers.linear": ("LinearBase", "ColumnParallelLinear", "MergedColumnParallelLinear", "QKVParallelLinear",
                                 "RowParallelLinear"),
    "sglang.srt.layers.quantization": ("QUANTIZATION_METHODS",),
    "sglang.srt.layers.quantization.base_config": ("QuantizeMethodBase", "LinearMethodBase", "QuantizationConfig"),
    "sglang.srt.layers.quantization.unquant": ("UnquantizedLinearMethod",),
    "sglang.srt.layers.vocab_parallel_embedding": ("VocabParallelEmbedding",),
    "sglang.srt.model_loader.loader": ("_get_quantization_config", "DefaultModelLoader"),
    "sglang.srt.plugins": ("GENERAL_PLUGINS_GROUP",),
}


def signatures(wheel: Path) -> dict[str, Any]:
    """The release of a wheel, and what NAMES are in it."""
    with zipfile.ZipFile(wheel) as archive:
        modules = {}
        for module, names in NAMES.items():
            path = module.replace(".", "/")
            own = next(name for name in (f"{path}.py", f"{path}/__init__.py") if name in archive.namelist())
            modules[module] = _values(ast.parse(archive.read(own)), names)
    return {"version": wheel.name.split("-")[1], "modules": modules}


def _values(tree: ast.Module, names: tuple[str, ...]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name in names:
            values[node.name] = _parameters(node)
        elif isinstance(node, ast.ClassDef) and node.name in names:
            methods = {own.name: _parameters(own) for own in node.body if isinstance(own, ast.FunctionDef)}
            attributes = sorted({target.attr for own in ast.walk(node) if isinstance(own, ast.Assign | ast.AnnAssign)
                                 for target in (own.targets if isinstance(own, ast.Assign) else [own.target])
                                 if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name)
                                 and target.value.id == "self"})
            values[node.name] = {"bases": [ast.unparse(base) for base in node.bases], "methods": methods,
                                 "attributes": attributes}
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            values |= {target.id: None for target in targets if isinstance(target, ast.Name) and target.id in names}
    missing = set(names) - values.keys()
    assert not missing, missing
    return values


def _parameters(node: ast.FunctionDef) -> list[str]:
    arguments = node.args
    star = [f"*{arguments.vararg.arg}"] if arguments.vararg else []
    double = [f"**{arguments.kwarg.arg}"] if arguments.kwarg else []
    positional, by_name = [*arguments.posonlyargs, *arguments.args], arguments.kwonlyargs
    return [own.arg for own in positional] + star + [own.arg for own in by_name] + double


if __name__ == "__main__":
    print(json.dumps(signatures(Path(sys.argv[1]))).replace(', "sglang', ',\n"sglang'))
