"""Random faults of one token: how many do the quick tests of their subject notice?

A fault is an operator, a comparison, a constant or a condition that is turned, two arguments that
change places, a minus that is lost, or a branch of a ``where`` that is always taken. Each is put
into a copy of the repository, and the quick tests of its subject run there until one fails. A fault
counts as noticed when a test fails, or when the tests take longer than ``LIMIT`` seconds.

    python benchmarks/mutants.py --number 100 --jobs 2 --json mutants.json
"""

import argparse
import ast
import os
import random
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from queue import Queue

from record import table_row, write

ROOT = Path(__file__).parent.parent
LIMIT = 600  # seconds
PACKAGE = "numpyro_fed"

# The modules that matter most, and the files of tests of each, the cheapest first.
SUBJECTS = {
    "text/split.py": "split scan handlers same_text frames",
    "text/log_density.py": "traces priors decomposition split frames pictures arviz_groups",
    "numerics/accurate_densities.py": "densities concentrations",
    "numerics/barycenters.py": "barycenters sfvi_avg",
    "numerics/losses.py": "losses relatives",
    "data/padding.py": "data own_rows decomposition runtime",
    "search/newton.py": "newton_steps mode own_start start influence",
    "weigh/weights.py": "importance element_errors mixture",
    "weigh/element_errors.py": "element_errors importance",
    "posterior/verdict.py": "importance tempered result vertical_correction",
    "pvi/server.py": "pvi_steps pvi pvi_local pvi_rejections pvi_trust relatives schedules",
    "pvi/silo.py": "pvi_steps pvi pvi_local pvi_rejections pvi_trust relatives schedules",
    "sfvi/algorithm.py": "sfvi objectives minibatches runtime",
    "network/policy.py": "of_data cli federation at_silo secure_sums requesters",
    "network/ledger.py": "any_order federation private_clips privacy at_silo",
    "network/silo_runs.py": "any_order vertical_nodes federation at_silo malformed",
    "network/silo_sums.py": "secure_sums",
    "privacy/masks.py": "masks secure_sums",
    "rounds/convergence.py": "convergence sfvi runtime",
}

OPERATORS = {ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.Div: "*", ast.MatMult: "*"}
OPERATORS |= {ast.Pow: "*", ast.FloorDiv: "/", ast.Mod: "+", ast.BitAnd: "|", ast.BitOr: "&"}
SIGNS = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.MatMult: "@"}
SIGNS |= {ast.Pow: "**", ast.FloorDiv: "//", ast.Mod: "%", ast.BitAnd: "&", ast.BitOr: "|"}
COMPARISONS = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
}


@dataclass(frozen=True)
class Fault:
    """One change of a module's text: ``old``, from character ``start`` on, becomes ``new``."""

    module: str
    line: int
    start: int
    old: str
    new: str

    def applied(self, text: str) -> str:
        assert text[self.start :].startswith(self.old)
        return text[: self.start] + self.new + text[self.start + len(self.old) :]


class Faults(ast.NodeVisitor):
    """All faults that a module's text can have; none in docstrings, types, messages or defaults."""

    def __init__(self, module: str, text: str) -> None:
        self.module, self.text, self.found = module, text, []
        self.lines = [0]
        for line in text.splitlines(keepends=True):
            self.lines.append(self.lines[-1] + len(line.encode()))
        self.visit(ast.parse(text))

    def place(self, line: int, column: int) -> int:
        """Return the character at a place that the parser gives in bytes."""
        return len(self.text.encode()[: self.lines[line - 1] + column].decode())

    def span(self, node: ast.AST) -> tuple[int, int]:
        return self.place(node.lineno, node.col_offset), self.place(
            node.end_lineno, node.end_col_offset
        )

    def add(self, node: ast.AST, start: int, old: str, new: str) -> None:
        self.found.append(Fault(self.module, node.lineno, start, old, new))

    def between(self, left: ast.AST, right: ast.AST, old: str, new: str) -> None:
        start, end = self.span(left)[1], self.span(right)[0]
        at = self.text.find(old, start, end)
        if at >= 0:
            self.add(right, at, old, new)

    def visit_Raise(self, node: ast.Raise) -> None:
        """Messages are no faults of what is computed."""

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """As above."""

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        for part in node.body:
            self.visit(part)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        if type(node.op) in OPERATORS and not isinstance(node.left, ast.Constant | ast.JoinedStr):
            self.between(node.left, node.right, SIGNS[type(node.op)], OPERATORS[type(node.op)])
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        left = node.left
        for op, right in zip(node.ops, node.comparators, strict=True):
            old, new = COMPARISONS[type(op)]
            self.between(left, right, old, new)
            left = right
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        old, new = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
        for left, right in pairwise(node.values):
            self.between(left, right, old, new)
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        start, _ = self.span(node)
        if isinstance(node.op, ast.Not):
            self.add(node, start, "not ", "")
        elif isinstance(node.op, ast.USub):
            self.add(node, start, "-", "+")
        self.generic_visit(node)

    def visit_If(self, node: ast.If) -> None:
        start, end = self.span(node.test)
        old = self.text[start:end]
        self.add(node, start, old, f"not ({old})")
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        start, end = self.span(node)
        old = self.text[start:end]
        if isinstance(node.value, bool):
            self.add(node, start, old, str(not node.value))
        elif isinstance(node.value, int | float):
            self.add(node, start, old, f"({old} + 1)")

    def visit_Call(self, node: ast.Call) -> None:
        plain = [a for a in node.args if not isinstance(a, ast.Starred)]
        for one, other in pairwise(plain):
            (a, b), (c, d) = self.span(one), self.span(other)
            first, gap, second = self.text[a:b], self.text[b:c], self.text[c:d]
            if first != second:
                self.add(one, a, first + gap + second, second + gap + first)
        if isinstance(node.func, ast.Attribute) and node.func.attr == "where" and len(plain) == 3:
            start, end = self.span(node)
            taken = self.span(plain[1])
            self.add(node, start, self.text[start:end], self.text[slice(*taken)])
        self.generic_visit(node)


def faults(number: int, seed: int) -> list[Fault]:
    """Return random faults, as many in each module as in any other, or one less."""
    chooser = random.Random(seed)
    chosen: list[Fault] = []
    all_of = {m: Faults(m, (ROOT / PACKAGE / m).read_text()).found for m in SUBJECTS}
    for found in all_of.values():
        chooser.shuffle(found)
    for i in range(number):
        module = list(SUBJECTS)[i % len(SUBJECTS)]
        chosen.append(all_of[module].pop())
    return chosen


def noticed(fault: Fault, copy: Path) -> str:
    """Return how the quick tests notice a fault in a copy of the repository; empty if not."""
    module = copy / PACKAGE / fault.module
    text = module.read_text()
    module.write_text(fault.applied(text))
    try:
        names = [f"test_{name}.py" for name in SUBJECTS[fault.module].split()]
        tests = [str(next((copy / "tests").rglob(name))) for name in names]
        run = subprocess.run(
            [sys.executable, "-m", "pytest", "-x", "-q", "-m", "not slow", *tests],
            cwd=copy,
            # Programs that no fault has changed are compiled once.
            env={
                **os.environ,
                "PYTHONPATH": str(copy),
                "JAX_COMPILATION_CACHE_DIR": str(copy.parent / "programs"),
            },
            capture_output=True,
            text=True,
            timeout=LIMIT,
        )
    except subprocess.TimeoutExpired:
        return "took too long"
    finally:
        module.write_text(text)
    if run.returncode == 0:
        return ""
    failed = [line for line in run.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return failed[0].split(" - ")[0] if failed else f"exit {run.returncode}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--number", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only", default="", help="part of a module's path")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    chosen = [f for f in faults(args.number, args.seed) if args.only in f.module]
    copies: Queue[Path] = Queue()
    with tempfile.TemporaryDirectory() as folder:
        for i in range(args.jobs):
            ignored = shutil.ignore_patterns(".venv*", ".git", "_build", "__pycache__")
            copies.put(Path(shutil.copytree(ROOT, Path(folder) / str(i), ignore=ignored)))

        def tried(fault: Fault) -> tuple[Fault, str]:
            copy = copies.get()
            try:
                return fault, noticed(fault, copy)
            finally:
                copies.put(copy)

        report = []
        with ThreadPoolExecutor(args.jobs) as pool:
            for fault, how in pool.map(tried, chosen):
                report.append({**asdict(fault), "noticed": how})
                old, new = (" ".join(text.split())[:60] for text in (fault.old, fault.new))
                print(f"{fault.module}:{fault.line}  {old} -> {new}  {how or 'NOT NOTICED'}")
    number = sum(bool(row["noticed"]) for row in report)
    print(f"{number} of {len(report)} faults were noticed.")
    if args.json:
        found = table_row("random faults that the quick tests notice", f"{number} of {len(report)}")
        write(args.json, [found | {"target": "90 of 100"}], details=report)


if __name__ == "__main__":
    main()
