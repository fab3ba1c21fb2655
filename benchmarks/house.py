"""The weight of a checkout: rooms, imports that climb, functions, and the code that one traced step runs.

    python benchmarks/house.py                        # this checkout
    python benchmarks/house.py --tree ../before       # another, of any commit
    python benchmarks/house.py --tree ../slime --package slime slime_plugins
    python benchmarks/house.py --trace DIRECTORY      # and the files of tests/e2e/train_traced.py, of this checkout's step

A line of code is one that is not blank, a comment or part of a docstring.  docs/development/house.md has what it printed.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import tokenize
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

LONG, MANY = 60, 8  # code lines of a function that is long, arguments of one that takes many
_NOT_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
    tokenize.ENCODING,
}
_FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef
WAYS = ("prompt", "routes", "update")  # as tests/e2e/train_traced.py names them
# Files that a reader follows through one step, chosen by hand at fc5a0cd6, with their names of before and of today; the
# others that run have no part in the story (metrics, logs, settings, what stands in for CUDA).
READ = set(
    """
    algo/advantages/estimators algo/advantages/grpo algo/aggregation algo/corrections algo/loss_rows
    algo/losses/ppo algo/policy_loss algo/reward_stats algo/shaping algo/trajectories engine/answer
    engine/backend engine/client engine/control engine/http engine/publish engine/sglang_http generation/buffer
    generation/episode generation/episode_task generation/group_scorer generation/producer
    generation/rollout_task generation/scheduler generation/shared generation/slots generation/stitch
    generation/update_gate host_group launch/engines launch/rollout_sources launch/start/rollouts
    launch/start/run_rank launch/start/servers launch/start/train launch/train layout/bins layout/microbatch
    layout/rows loop/async_loop loop/canaries loop/device_turns loop/distribute loop/fleet loop/intake
    loop/outcome loop/prepare loop/rank_zero loop/recorded loop/route_transport loop/run_state
    loop/server_checksums loop/server_weights loop/step_proof loop/train_rollout loop/weight_update proof/judge
    proof/live proof/step_verdict rewards/scoring routing/wire trainer/megatron/actor trainer/megatron/export
    trainer/megatron/forward_step trainer/megatron/log_probs trainer/megatron/loss_metrics
    trainer/megatron/replay trainer/megatron/replay_evidence types
    """.split()
)


def code_lines(source: str) -> set[int]:
    """The lines of code of a file: not blank, no comment, no docstring."""
    found: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NOT_CODE:
            found.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | _FUNCTIONS) and ast.get_docstring(node):
            text = node.body[0]
            found.difference_update(range(text.lineno, text.end_lineno + 1))
    return found


def num_arguments(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Its arguments, without ``self`` and ``cls``."""
    arguments = function.args
    names = [a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    return len(names) - (names[:1] in (["self"], ["cls"]))


@dataclass
class House:
    """The figures of one checkout; files and rooms are relative to the package, functions are ``file:line name``."""

    rooms: Counter[str] = field(default_factory=Counter)
    files: int = 0
    long_functions: list[str] = field(default_factory=list)
    many_arguments: list[str] = field(default_factory=list)
    inner_imports: int = 0
    imports: set[tuple[str, str]] = field(
        default_factory=set
    )  # of a file, of another of the package

    @property
    def package(self) -> int:
        return sum(self.rooms.values())


def measure(packages: Sequence[Path]) -> House:
    """Measure the files of packages, each a directory."""
    house = House()
    for package in packages:
        files = [
            f for f in sorted(package.rglob("*.py")) if "tests" not in f.relative_to(package).parts
        ]
        modules = {_module(file, package): file for file in files}
        for name, file in modules.items():
            source = file.read_text(encoding="utf-8")
            lines, tree = code_lines(source), ast.parse(source)
            relative = file.relative_to(package)
            house.files += 1
            house.rooms[relative.parts[0] if len(relative.parts) > 1 else "(top level)"] += len(
                lines
            )
            for node in ast.walk(tree):
                if isinstance(node, _FUNCTIONS):
                    inside = lines.intersection(range(node.lineno, node.end_lineno + 1))
                    place = f"{relative}:{node.lineno} {node.name}"
                    if len(inside) > LONG:
                        house.long_functions.append(f"{place} {len(inside)}")
                    if num_arguments(node) >= MANY:
                        house.many_arguments.append(f"{place} {num_arguments(node)}")
            inner = (
                child
                for node in ast.walk(tree)
                if isinstance(node, _FUNCTIONS)
                for child in ast.walk(node)
                if isinstance(child, ast.Import | ast.ImportFrom)
            )
            house.inner_imports += len({child.lineno for child in inner})
            house.imports |= {(name, other) for other in _imported(tree, modules) if other != name}
    return house


def _module(file: Path, package: Path) -> str:
    parts = file.relative_to(package.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imported(tree: ast.Module, modules: dict[str, Path]) -> Iterator[str]:
    """Yield the modules of a package that a file names in its imports, inside functions and for types alone too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)
        elif isinstance(node, ast.ImportFrom) and node.module is not None and not node.level:
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                if whole in modules or node.module in modules:
                    yield whole if whole in modules else node.module


def climbs(house: House, tree: Path, package: str) -> list[tuple[str, str]]:
    """Imports from a room to one that the first contract of pyproject.toml puts above it, or next to it as independent."""
    pyproject = tomllib.loads((tree / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = pyproject["tool"]["importlinter"]["contracts"]
    layers = next(c["layers"] for c in contracts if c["type"] == "layers")
    floor = {
        room.strip(): number
        for number, layer in enumerate(reversed(layers))
        for room in layer.replace("|", ":").split(":")
    }

    def of(module: str) -> int | None:
        parts = module.split(".")
        return floor.get(parts[1]) if len(parts) > 1 else None

    places = ((one, other, of(one), of(other)) for one, other in house.imports)
    return sorted(
        (one, other)
        for one, other, low, high in places
        if low is not None and high is not None and low < high
    )


def circles(imports: set[tuple[str, str]]) -> list[list[str]]:
    """Files that import one another in a ring, the largest ring first."""
    after: dict[str, set[str]] = {}
    for one, other in imports:
        after.setdefault(one, set()).add(other)

    def reached(start: str) -> set[str]:
        seen, stack = set(), [start]
        while stack:
            for other in after.get(stack.pop(), ()):
                if other not in seen:
                    seen.add(other)
                    stack.append(other)
        return seen

    reach = {one: reached(one) for one in after}
    rings = {
        tuple(sorted(o for o in reach[one] if one in reach.get(o, ())))
        for one in after
        if one in reach[one]
    }
    return sorted(map(list, rings), key=len, reverse=True)


def ran(traces: Sequence[Path], package: Path) -> dict[str, dict[str, set[int]]]:
    """The code that ran in a step, of ``step`` as a whole and of each way: its lines by file."""
    found: dict[str, dict[str, set[int]]] = {way: {} for way in ("step", *WAYS)}
    for file, functions in chain.from_iterable(
        json.loads(trace.read_text(encoding="utf-8")).items() for trace in traces
    ):
        source = (package / file).read_text(encoding="utf-8")
        lines, spans = code_lines(source), _spans(source)
        for first, ways in functions.items():
            end = spans.get(int(first), int(first))
            inside = lines.intersection(range(int(first), end + 1))
            for way in ("step", *ways):
                found[way].setdefault(file, set()).update(inside)
    return found


def _spans(source: str) -> dict[int, int]:
    """Functions by the line at which their code begins (of the first decorator, if there are any): their last line."""
    spans: dict[int, int] = {}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, _FUNCTIONS | ast.Lambda):
            first = min(
                (d.lineno for d in getattr(node, "decorator_list", ())), default=node.lineno
            )
            spans[first] = max(spans.get(first, 0), node.end_lineno)
    return spans


def by_room(files: Iterable[str]) -> str:
    """The files by their rooms: ``room: name, name; room: name``."""
    rooms: dict[str, list[str]] = {}
    for file in sorted(files):
        room, _, name = file.removesuffix(".py").rpartition("/")
        rooms.setdefault(room or "top level", []).append(name)
    return "; ".join(f"{room}: {', '.join(names)}" for room, names in rooms.items())


def main() -> None:
    """Print the figures of a checkout."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--tree", type=Path, default=Path(__file__).resolve().parents[1])
    parser.add_argument("--package", nargs="+", default=["r3train"], help="directories of the tree")
    parser.add_argument("--tests", nargs="+", default=["tests"], help="directories of the tree")
    parser.add_argument(
        "--trace", type=Path, help="directory of rank_N.json, of a step of this tree"
    )
    args = parser.parse_args()
    packages = [args.tree / name for name in args.package]
    house = measure(packages)
    tests = measure([args.tree / name for name in args.tests if (args.tree / name).is_dir()])
    print(f"package: {house.package:,} code lines in {house.files} files")
    print(f"tests: {tests.package:,}, {tests.package / house.package:.2f} a line of the package")
    print(
        f"functions above {LONG} code lines: {len(house.long_functions)}",
        *house.long_functions,
        sep="\n  ",
    )
    print(
        f"functions of {MANY} and more arguments: {len(house.many_arguments)}",
        *house.many_arguments,
        sep="\n  ",
    )
    print(f"imports inside functions: {house.inner_imports}")
    print("rooms:", *(f"{room} {lines:,}" for room, lines in house.rooms.most_common()), sep="\n  ")
    if args.package == ["r3train"]:
        above = climbs(house, args.tree, "r3train")
        print(f"imports that climb: {len(above)}", *map(" -> ".join, above), sep="\n  ")
    rings = circles(house.imports)
    print(
        f"rings of files: {len(rings)}",
        *(f"{len(ring)}: {' '.join(ring)}" for ring in rings),
        sep="\n  ",
    )
    if args.trace:
        for way, files in ran(sorted(args.trace.glob("rank_*.json")), packages[0]).items():
            print(
                f"{way}: {len(files)} files, {sum(map(len, files.values())):,} code lines that ran"
            )
            if way == "step":
                read = {f: lines for f, lines in files.items() if f.removesuffix(".py") in READ}
                print(f"  of those to read: {len(read)} files, {sum(map(len, read.values())):,}")
            print(f"  {by_room(files)}")


if __name__ == "__main__":
    main()
