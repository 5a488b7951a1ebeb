"""The text of a formula's model, line by line."""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from numpyro_fed.basics.errors import ModelError
from numpyro_fed.formulas.design import ColumnBlock, Design, ReadTerms
from numpyro_fed.formulas.grammar import SILO, GroupEffect, Smooth, names_in
from numpyro_fed.formulas.outcomes import COVARIATES, OutcomeFamily

WIDE = 2.5  # of priors, in sds of the outcomes, as in rstanarm
OF_SILOS = 1.0  # the same of the sd of silos' effects: few silos say little of it
REACH = 2.5  # sds of a column from its mean, beyond which a smooth function is a line
HEAD = """# {formula}, family {family}

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist

import numpyro_fed as nf


"""


@dataclass(frozen=True)
class WrittenText:
    """The text of a formula's model, given what silos have agreed on; ``str`` of it is Python."""

    formula: str
    family: str
    distribution: OutcomeFamily
    design: Design
    priors: Mapping[str, str]
    shared: tuple[str, ...]
    missing: Mapping[str, str]

    @cached_property
    def own_groups(self) -> list[GroupEffect]:
        """Return effects of groups whose members belong to one silo each, one for each group.

        Outer groups stand before those within them.
        """
        others = [(SILO,), *((name,) for name in self.shared)]
        groups = {g.factors: g for g in self.design.grammar.groups if g.factors not in others}
        return sorted(groups.values(), key=self._depth)

    def _depth(self, effect: GroupEffect) -> int:
        """Return how many groups an effect's group is within."""
        factors = {g.factors for g in self.design.grammar.groups}
        return sum(self._is_within(effect.factors, other) for other in factors)

    def _is_within(self, inner: tuple[str, ...], outer: tuple[str, ...]) -> bool:
        """Return whether members of a group within a silo belong to one of another each."""
        return {*outer} < {*inner} or (inner, outer) in self.design.agreed.nested

    @cached_property
    def above(self) -> dict[GroupEffect, GroupEffect]:
        """Return for effects of nested groups the same effects of the closest group around.

        They are the means of these, so that rows look up one group alone, whose members are
        independent given those above. Each is the mean of one other, or it would count twice.
        """
        own = {g.factors for g in self.own_groups}
        effects = [g for g in self.design.grammar.groups if g.factors in own]
        found: dict[GroupEffect, GroupEffect] = {}
        for effect in sorted(effects, key=self._depth, reverse=True):
            around = [
                g
                for g in effects
                if self._is_within(effect.factors, g.factors)
                and g.expression == effect.expression
                and g not in found.values()
            ]
            if around:
                found[effect] = max(around, key=self._depth)
        return found

    @property
    def nestings(self) -> dict[str, tuple[GroupEffect, GroupEffect]]:
        """Return by argument each group with the one above it, of which it has the codes."""
        return {self.codes_above(*pair): pair for pair in self.above.items()}

    @cached_property
    def columns(self) -> list[str]:
        """Return the columns of the table that are arguments of the text."""
        grammar = self.design.grammar
        words = names_in([c.expression for c in self.design.all_columns if not c.computed])
        words |= {s.column for s in grammar.smooths} | {*grammar.additions.values(), *self.shared}
        agreed = self.design.agreed
        return sorted(words & {*agreed.mean, *agreed.names} - {grammar.response})

    @cached_property
    def computed(self) -> list[ColumnBlock]:
        """Return the arguments that the library computes of a silo's table."""
        return list({c.expression: c for c in self.design.all_columns if c.computed}.values())

    @property
    def arguments(self) -> list[str]:
        """Return the names of all arguments but the outcome."""
        sizes = (self.size_of(g) for g in self.own_groups)
        return [*self._of_rows, *(n for n in sizes if n.isidentifier()), *self.nestings]

    @property
    def _of_rows(self) -> list[str]:
        """Return the names of those arguments that hold a number of each row."""
        effects = [g for g in self.design.grammar.groups if g not in self.above.values()]
        looked_up = {g.factors for g in effects}
        codes = (self.codes_of(g) for g in self.own_groups if g.factors in looked_up)
        return [*self.columns, *(c.expression for c in self.computed), *codes]

    @property
    def rows(self) -> str:
        """Return the number of rows, as text."""
        return f"{next(iter(self._of_rows), self.design.grammar.response)}.shape[0]"

    def size_of(self, effect: GroupEffect) -> str:
        """Return the number of members of a group within a silo, as text."""
        arrays = (name for name, (g, _) in self.nestings.items() if g.factors == effect.factors)
        return next((f"{name}.shape[0]" for name in arrays), f"n_{self.codes_of(effect)}")

    @cached_property
    def scale(self) -> float:
        """Return the scale of the linear predictor: the outcomes' sd, or one beside a link."""
        response = self.design.grammar.response
        is_link = self.distribution.link != "identity"
        return 1.0 if is_link else self.design.agreed.sd[response] or 1.0

    def __str__(self) -> str:
        grammar = self.design.grammar
        outside, sums = list(self._coefficients()), self._sums_of_coefficients
        for column in self.missing:
            outside += self._covariate_prior(column)
        for smooth in grammar.smooths:
            outside += self._smooth_prior(smooth)
        # Outer groups first, whose effects are the means of those within them.
        for effect in sorted(grammar.groups, key=self._depth):
            outside += self._group_prior(effect, self.design.terms_of(effect.expression))
        outside += [self._sample(name, prior) for name, prior in self._parameters]
        inside = [self._covariate(column) for column in self.missing]
        inside += [line for smooth in grammar.smooths for line in _smooth(smooth, self.design)]
        inside += [f"X = {_matrix(self.design.common.columns)}"] if sums[-1:] == ["XB"] else []
        product = "(X - centre) @ b" if self._is_centred else "X @ b"
        sums = [product if s == "XB" else s for s in sums]
        sums += [offset.expression for offset in self.design.common.offsets]
        sums += [f"s_{smooth.column}" for smooth in grammar.smooths]
        means = {*self.above.values()}
        sums += [
            self._group_sum(g, self.design.terms_of(g.expression))
            for g in grammar.groups
            if g not in means
        ]
        inside.append(f"eta = {' + '.join(sums) or f'jnp.zeros({self.rows})'}")
        if self.distribution.mean:
            inside.append(f'numpyro.deterministic("mean", {self.distribution.mean})')
        inside += self._likelihood
        arguments = ", ".join([*self.arguments, f"{grammar.response}=None"])
        lines = [f"def model({arguments}):", *(f"    {line}" for line in outside)]
        lines += [f'    with nf.silo_plate("row", {self.rows}):', *(f"        {i}" for i in inside)]
        head = HEAD.format(formula=" ".join(self.formula.split()), family=self.family)
        text = head + "".join(f"{_wrapped(line)}\n" for line in lines)
        self._check(text)
        return text

    def _check(self, text: str) -> None:
        """Raise an error for columns whose names the text has, and for priors that nobody has."""
        names = [*self.arguments, self.design.grammar.response]
        if twice := sorted(name for name in {*names} if names.count(name) > 1):
            raise ModelError(f"a column has the name of an argument, '{twice[0]}': rename it.")
        arguments, found = {*names}, list(ast.walk(ast.parse(text)))
        for column, family in self.missing.items():
            if family != "lognormal" and self.design.is_positive(column):
                raise ModelError(
                    f"missing: '{column}' is {family!r}, and may be below zero where the formula "
                    "takes its log or root: 'lognormal' is not."
                )
        for block in self.computed:
            if lost := sorted({*self.missing} & names_in([block.computed])):
                raise ModelError(
                    f"missing: the term '{block.computed}' is computed before the model, where "
                    f"'{lost[0]}' is not known. The text computes s({lost[0]}), log({lost[0]}) and "
                    f"I({lost[0]}**2)."
                )
        own = {n.id for n in found if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        own |= {"dist", "jax", "jnp", "nf", "numpyro"}
        own -= {*self.missing}
        if taken := sorted(arguments & own):
            raise ModelError(f"the text has a name {taken[0]!r} of its own: rename that column.")
        calls = (n for n in found if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute))
        latents = [n for n in calls if not any(word.arg == "obs" for word in n.keywords)]
        sites = {n.args[0].value for n in latents if n.func.attr == "sample"}  # type: ignore[attr-defined]
        known = {*sites, "Intercept", "cutpoints", "sd"}
        if unknown := sorted({*self.priors} - known):
            raise ModelError(f"priors: there is no {unknown[0]!r}; known are {sorted(known)}.")

    def _prior(self, name: str, prior: str) -> str:
        """Return the user's prior of a site, or this one."""
        return self.priors.get(name, self.priors.get(name.removesuffix("_centred"), prior))

    @property
    def _sums_of_coefficients(self) -> list[str]:
        common = self.design.common
        one = ["intercept"] if common.intercept and not self.distribution.ordinal else []
        return [*one, *["XB"] * bool(common.labels)]

    @property
    def _is_centred(self) -> bool:
        """Return whether columns are centred: not without an intercept, which takes it back."""
        return self.design.common.intercept or self.distribution.ordinal

    def _coefficients(self) -> Iterator[str]:
        """Return the lines of the intercept, or of cutpoints, and of the coefficients."""
        common, has_one = self.design.common, "intercept" in self._sums_of_coefficients
        if self.distribution.ordinal:
            size = self.design.agreed.categories - 1
            base = f"dist.Normal(0.0, 3.0).expand([{size}]).to_event(1)"
            ordered = "dist.transforms.OrderedTransform()"
            prior = f"dist.TransformedDistribution({base}, {ordered})"
            name = "cutpoints_centred" if common.labels else "cutpoints"
            yield f"cutpoints = {self._site(name, prior)}"
        if has_one:
            where = _number(self._location, self.scale)
            prior = f"dist.Normal({where}, {_number(WIDE * self.scale)})"
            name = "Intercept_centred" if common.labels else "Intercept"
            yield f"intercept = {self._site(name, prior)}"
        if common.labels:
            width = np.concatenate([c.width for c in common.columns])
            prior = f"dist.Normal(0.0, {_array(WIDE * self.scale / width)}).to_event(1)"
            yield f"b = {self._site('b', prior, common.labels)}"
            if self._is_centred:
                centre = np.concatenate([c.centre for c in common.columns])
                yield f"centre = {_array(centre, width)}"
        if has_one and common.labels:
            yield 'numpyro.deterministic("Intercept", intercept - centre @ b)'
        if self.distribution.ordinal and common.labels:
            yield 'numpyro.deterministic("cutpoints", cutpoints + centre @ b)'

    @property
    def _location(self) -> float:
        """Return where the intercept is about: the link of the outcomes' mean, less offsets."""
        agreed, grammar = self.design.agreed, self.design.grammar
        mean = agreed.mean[grammar.response]
        offset = sum(float(c.centre[0]) for c in self.design.common.offsets)
        if self.distribution.link == "log":
            return math.log(max(mean, 1e-3)) - offset
        if self.distribution.link == "identity":
            return mean - offset
        trials = grammar.additions.get("trials")
        return _logit(mean / agreed.mean[trials] if trials else mean) - offset

    @property
    def _parameters(self) -> list[tuple[str, str]]:
        scale = _number(WIDE * self.scale)
        return [(name, words.format(s=scale)) for name, words in self.distribution.parameters]

    def _sample(self, name: str, prior: str) -> str:
        return f"{name} = {self._site(name, prior)}"

    def _site(self, name: str, prior: str, labels: Sequence[str] = ()) -> str:
        """Return a latent with the user's prior, or this one."""
        # As JSON: levels are words of silos, which must stay words whatever is in them.
        words = f', infer={{"labels": {json.dumps(list(labels))}}}' if labels else ""
        return f'numpyro.sample("{name}", {self._prior(name, prior)}{words})'

    def _beside(self, column: str) -> list[ColumnBlock]:
        """Return the columns on whose line a column with missing values lies.

        They are those of the formula that have a value at each row, and missing ones before it.
        """
        later = {*list(self.missing)[list(self.missing).index(column) :]}
        columns = self.design.common.columns
        return [c for c in columns if not later & names_in([c.computed or c.expression])]

    def _covariate_prior(self, column: str) -> Iterator[str]:
        """Return the lines of the parameters of a column with missing values."""
        mean, sd = self.design.agreed.mean[column], self.design.agreed.sd[column] or 1.0
        family, beside = self.missing[column], self._beside(column)
        if family == "lognormal":
            sd = math.sqrt(math.log1p((sd / mean) ** 2))
            mean = math.log(mean) - sd**2 / 2
        elif family == "bernoulli":
            mean, sd = _logit(mean), 1.0
        yield f"# Where {column} is missing it lies about a line of the columns beside it."
        prior = f"dist.Normal({_number(mean, sd)}, {_number(WIDE * sd)})"
        yield f"intercept_{column} = {self._site(f'Intercept_{column}', prior)}"
        if beside:
            width = np.concatenate([c.width for c in beside])
            centre = np.concatenate([c.centre for c in beside])
            labels = [label for c in beside for label in c.labels]
            prior = f"dist.Normal(0.0, {_array(WIDE * sd / width)}).to_event(1)"
            yield f"b_{column} = {self._site(f'b_{column}', prior, labels)}"
            yield f"centre_{column} = {_array(centre, width)}"
        if "sigma" in COVARIATES[family]:
            prior = f"dist.HalfNormal({_number(WIDE * sd)})"
            yield self._sample(f"sigma_{column}", prior)

    def _covariate(self, column: str) -> str:
        """Return the line in which a column with missing values gets them."""
        eta = f"intercept_{column}"
        if beside := self._beside(column):
            eta += f" + ({_matrix(beside)} - centre_{column}) @ b_{column}"
        words = COVARIATES[self.missing[column]].format(eta=eta, sigma=f"sigma_{column}")
        mask = f"~jnp.isnan({column})"
        return f'{column} = numpyro.sample("{column}", {words}, obs={column}, obs_mask={mask})'

    def _smooth_prior(self, smooth: Smooth) -> Iterator[str]:
        x, k = smooth.column, smooth.size
        yield f"# Beside its line a function of {x} by {k} cosines, smooth as a cubic spline is."
        of_sd = f"dist.HalfNormal({_number(WIDE * self.scale)})"
        yield f"sd_s_{x} = {self._site(f'sd_s_{x}', of_sd)}"
        yield f"wave_{x} = jnp.arange(2, {k + 2})"
        normal = f"dist.Normal(0.0, 1.0).expand([{k}]).to_event(1)"
        yield f"weight_{x} = sd_s_{x} / wave_{x}**2 * {self._site(f's_{x}', normal)}"

    def _group_prior(self, group: GroupEffect, terms: ReadTerms) -> Iterator[str]:
        """Return the lines of a group's latents."""
        name, labels = group.name, [*["Intercept"] * terms.intercept, *terms.labels]
        if terms.offsets:
            raise ModelError(f"the effects of '{name}' have an offset, which is no effect.")
        width = np.concatenate([np.ones(int(terms.intercept)), *(c.width for c in terms.columns)])
        sds = (OF_SILOS if group.factors == (SILO,) else WIDE) * self.scale / width
        prior, k = self.priors.get("sd", ""), len(labels)
        mean = "0.0"
        if not k:
            raise ModelError(f"the group '{name}' has no effect: write (1 | {name}).")
        if (above := self.above.get(group)) is not None:
            mean = f"r_{above.name}[{self.codes_above(group, above)}]"
        if k == 1:
            yield self._sample(f"sd_{name}", prior or f"dist.HalfNormal({_number(sds[0])})")
            each = f"dist.Normal({mean}, sd_{name})"
        else:
            words = prior or f"dist.HalfNormal({_array(sds)}).to_event(1)"
            yield f"sd_{name} = {self._site(f'sd_{name}', words, labels)}"
            each = f"dist.Normal({mean}, sd_{name}).to_event(1)"
            if group.correlated:
                yield self._sample(f"L_{name}", f"dist.LKJCholesky({k}, 1.0)")
                below = "1, 0" if k == 2 else f"jnp.tril_indices({k}, -1)"
                yield f'numpyro.deterministic("cor_{name}", (L_{name} @ L_{name}.T)[{below}])'
                root = f"scale_tril=sd_{name}[:, None] * L_{name}"
                means = "" if above is None else f"{mean}, "
                each = f"dist.MultivariateNormal({means}{root})"
        if group.factors[0] not in self.shared:
            size = "1" if group.factors == (SILO,) else self.size_of(group)
            yield f'with nf.silo_plate("{group.group}", {size}):'
            yield f"    r_{name} = {self._site(f'r_{name}', each, labels if k > 1 else ())}"
            return
        members = list(self.design.agreed.names[group.factors[0]])
        yield f'with numpyro.plate("{name}s", {len(members)}):'
        yield f"    r_{name} = {self._site(f'r_{name}', each, members if k == 1 else labels)}"

    def _index(self, group: GroupEffect) -> str:
        """Return the argument that has the member of each row; 0 for the silo."""
        if group.factors == (SILO,):
            return "0"
        return group.factors[0] if group.factors[0] in self.shared else self.codes_of(group)

    def codes_of(self, effect: GroupEffect) -> str:
        """Return the argument with the codes of a group, which is no column by another name."""
        return f"{effect.group}_group" if effect.group in self.columns else effect.group

    def codes_above(self, effect: GroupEffect, above: GroupEffect) -> str:
        """Return the argument with the code of the group above each member of a group."""
        return f"{self.codes_of(above)}_of_{self.codes_of(effect)}"

    def _group_sum(self, group: GroupEffect, terms: ReadTerms) -> str:
        """Return what a group adds to the linear predictor."""
        of_row = f"r_{group.name}[{self._index(group)}]"
        if terms.intercept and not terms.columns:
            return of_row
        if len(terms.labels) == 1 and not terms.intercept:
            return f"{terms.columns[0].expression} * {of_row}"
        ones = [f"jnp.ones({self.rows})"] * terms.intercept
        matrix = ", ".join([*ones, *(c.expression for c in terms.columns)])
        return f"(jnp.column_stack([{matrix}]) * {of_row}).sum(-1)"

    @property
    def _likelihood(self) -> list[str]:
        """Return the lines of the outcome."""
        grammar, words = self.design.grammar, self.distribution.likelihood
        y, additions = grammar.response, grammar.additions
        if "trials" in additions:
            words = words.replace("trials", additions["trials"])
        if "cens" in additions:
            words = f"dist.RightCensoredDistribution({words}, {additions['cens']})"
        line = f'numpyro.sample("{y}", {words}, obs={y})'
        if "weights" not in additions:
            return [line]
        return [f"with numpyro.handlers.scale(scale={additions['weights']}):", f"    {line}"]


def _smooth(smooth: Smooth, design: Design) -> Iterator[str]:
    """Return the lines of a smooth function at the rows."""
    x, agreed = smooth.column, design.agreed
    sd = agreed.sd[x] or 1.0
    in_sds = f"({x} - {_number(agreed.mean[x], sd)}) / {_number(sd)}"
    reach = _number(REACH)
    yield f"at_{x} = jnp.clip({in_sds}, -{reach}, {reach}) + {reach}"
    yield f"s_{x} = jnp.cos(at_{x}[:, None] * wave_{x} * jnp.pi / {2 * REACH}) @ weight_{x}"


def _matrix(columns: Sequence[ColumnBlock]) -> str:
    if len(columns) == 1 and columns[0].is_vector:
        return f"({columns[0].expression})[:, None]"
    return f"jnp.column_stack([{', '.join(c.expression for c in columns)}])"


def _logit(share: float) -> float:
    share = min(max(share, 0.01), 0.99)
    return math.log(share / (1 - share))


def _number(value: float, scale: float = 0.0) -> str:
    """Return a number of four digits, or of as many as it needs to be right to the scale."""
    digits = 4
    if value and scale:
        digits = max(4, 3 + math.ceil(math.log10(abs(value) / scale)))
    return repr(float(f"{float(value):.{digits}g}"))


def _array(values: np.ndarray, scales: np.ndarray | None = None) -> str:
    scales = np.zeros(len(values)) if scales is None else scales
    return f"jnp.array([{', '.join(map(_number, values, scales))}])"


def _wrapped(line: str) -> str:
    """Return a line of at most a hundred characters, cut behind commas that are in no string."""
    indent = " " * (len(line) - len(line.lstrip()) + 4)
    parts, found = re.findall(r'(?:"(?:\\.|[^"\\])*"|:, |[^",])*(?:, |$)', line), [""]
    for part in parts:
        if found[-1].strip() and len(found[-1] + part.rstrip()) > 100:
            found[-1] = found[-1].rstrip()
            found.append(indent)
        found[-1] += part
    return "\n".join(found)
