"""What a traced program holds at its widest point, as a compiler lays it out.

Arrays are followed in the order of the program, from the equation that makes them to the last that reads them:

- Results of products, kernels, collectives, loops, gathers and sums are arrays, and so is what an operation makes that
  is not known here: compilers do not join these with what reads them.
- An elementwise result is no array, and what it is made of stays while it is used: compilers join elementwise work with
  what reads it, and do it again for another reader. It is one where an operation of the first kind reads it, or where
  it takes the place of two arrays of its size.
- A transposed array is the same one, except where a kernel or a collective reads it: these read one order only.
- Elementwise work writes in place of an operand of as many bytes that ends there; so do an update of a part, and a loop
  what it carries.
- The part that an iteration reads of a larger array is an array, from the beginning of the iteration, where an
  operation of the first kind reads it.
- A loop holds what it reads, its results, and the widest point of its body.
- What a checkpoint computes again is made when all that it reads is there, the gradient included (qwen3_5_35b_a3b on
  h200: input_transpose_fusion.11 to .13 come after the feed-forward part).

Each backend has rules of its own. In parentheses is a step of docs/planning.md whose compiled program shows it, with
instructions of that program:

- A CPU keeps the weights that are gathered together until the last of them is used, and makes copies of their gradients
  where these are made (`tests/parity/test_memory.py`).
- A CPU makes an elementwise result once for several operations that read it, if it is made of two arrays or costly
  (qwen3_5, one sequence: multiply_add_fusion.22 and .23, add_divide_fusion.10 to .12), and reads an array to sum over
  more than 32 numbers (wrapped_reduce-window.91 reads bitcast_multiply_fusion).
- A CPU has no barriers, does equal operations once, and has no loop of one iteration (qwen3_5, four sequences:
  add_exponential_fusion.2 of both passes). Where an iteration has several layers, what needs no gradient is made first
  in all of them (`tests/parity/test_memory.py`).
- A CPU and a GPU make zeros, which an inner loop writes its results over, when an iteration begins (qwen3_5, one
  sequence: wrapped_broadcast.49 and .50; qwen3_5_35b_a3b on h200: loop_broadcast_fusion.24 and .27, copy.719).
- A GPU joins gathers with what reads them (qwen3_30b_a3b: loop_convert_fusion.5 sums rows that are no arrays).
- A GPU sums the gradients of weights in the next iteration: those of the layer before are there while new ones are
  made (mixtral_8x7b on h200: copy.291 of loop_peel_param, and copy.312).
- A TPU makes results in one loop, when the last of what they read is there, if they go through the same dimensions,
  share what they read and do not need each other: first sums, then those that share the most bytes, none of an array
  of 4 GiB (mixtral_8x7b). So an activation waits for its gradients, and the product after it for the gradients of rows
  (olmoe_1b_7b with ring: fusion.624 of ragged-dot-none to .2, then fusion.625 of .3 to .5; deepseek_v3), unless gates
  and their gradients are made together before (olmoe_1b_7b with Muon: select_reduce_fusion.19).
- A TPU makes an elementwise result that others are made of with the first of them (gpt_oss_20b: of four products
  multiply_select_fusion.5), and waits with one after which no array ends until one does (mixtral_8x7b: fusion.520 comes
  first).
- A TPU makes a gradient of weights, which nothing else in the iteration reads, and its sum at once if that frees more
  than it makes (mixtral_8x7b: ragged-dot-none.8 before ragged-dot-none.3), and else last (olmoe_1b_7b with Muon:
  all-reduce.30). Where tokens are exchanged it is always last (deepseek_v2_lite with capacity: after all_to_all.145;
  olmoe_1b_7b with ring: ragged-dot-none.8 after fusion.625).

Otherwise the order of a compiler may differ. docs/planning.md has how far the result is from what compilers have in
use.
"""

import functools
import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from moezoo.parallel.traces import COLLECTIVES, Equation, branch_for, scan_counts

# What compilers join with what reads it.
_ELEMENTWISE = frozenset(
    """abs acos acosh add add_any and asin asinh atan atan2 atanh axis_index broadcast_in_dim cbrt ceil clamp
    concatenate convert_element_type cos cosh div dynamic_slice eq erf erf_inv erfc exp exp2 expm1 floor ge gt
    integer_pow iota is_finite le le_to log log1p logistic lt lt_to max min mul ne neg nextafter not or pad
    population_count pow random_bits random_fold_in random_seed random_wrap random_unwrap real rem rev round
    rsqrt select_n shift_left shift_right_arithmetic shift_right_logical sign sin sinh slice split sqrt square
    stack sub tan tanh threefry2x32 xor""".split()  # noqa: SIM905
)
# What moves nothing.
SAME = frozenset(
    """bitcast_convert_type copy expand_dims name optimization_barrier pcast pvary reduce_precision reshape
    sharding_constraint squeeze stop_gradient transpose""".split()  # noqa: SIM905
)
# Of these nothing is left when a CPU looks for equal operations.
_MARKS = frozenset(("name", "optimization_barrier", "pcast", "pvary", "sharding_constraint", "stop_gradient"))
_REDUCTIONS = frozenset(
    """argmax argmin reduce_and reduce_max reduce_min reduce_or reduce_prod reduce_sum""".split()  # noqa: SIM905
)
# What is behind is made when all that enters is there.
_BARRIER = "optimization_barrier"
# Several results that a TPU makes in one loop; and of how many bytes an array is left out of such a loop.
_TOGETHER, _LARGE = "together", 1 << 32
_LOOPS = {"scan": "jaxpr", "while": "body_jaxpr", "cond": "branches"}
# Elementwise operations that a CPU does once for all that read them. It makes sums of more numbers than that apart.
_COSTLY = frozenset(
    """acos acosh asin asinh atan atan2 atanh cbrt cos cosh erf erf_inv erfc exp exp2 expm1 log log1p logistic pow rsqrt
    sin sinh sqrt tan tanh""".split()  # noqa: SIM905
)
_SUMMED_APART = 32
_KERNELS = frozenset(("pallas_call", "mosaic_gpu", "ffi_call", "core_map"))
# The beginnings of the names of operations whose inner program joins two numbers.
_COMBINING = ("scatter", "reduce", "select_and")


class Held(NamedTuple):
    """The widest point of a program: the `bytes` of all arrays that it holds, and those of its named `parts`."""

    bytes: int
    parts: Mapping[str, int]


class _Step(NamedTuple):
    """An operation: what it is, the arrays that it reads and makes, its named scopes, and what its body holds.

    `places`: result -> what is read in whose place it is written, if that ends there.
    """

    name: str
    equation: JaxprEqn
    reads: tuple[int, ...]
    makes: tuple[int, ...]
    scope: str
    body: int
    places: Mapping[int, int]
    platform: str

    @property
    def joins(self) -> bool:
        """Whether a compiler joins the operation with what it reads."""
        gathers = self.platform == "cuda" and self.name == "gather"
        return gathers or self.ends_loop or self.name in _ELEMENTWISE or self.name in SAME

    @property
    def stacks(self) -> tuple[int, ...]:
        """What a scan stacks."""
        return self.makes[scan_counts(self.equation)[1] :]

    @property
    def ends_loop(self) -> bool:
        """Whether a compiler joins it with what it reads, and not with what reads it."""
        return self.name == _TOGETHER or (self.name in _REDUCTIONS and not self.sums_apart)

    @property
    def sums_apart(self) -> bool:
        """Whether a CPU reads an array to make sums over windows first, and then sums of these."""
        x: Any = self.equation.invars[0].aval
        axes = self.equation.params["axes"] if self.name in _REDUCTIONS and self.platform == "cpu" else ()
        return any(x.shape[axis] > _SUMMED_APART for axis in axes)

    @property
    def loop(self) -> tuple[int, ...]:
        """The dimensions that a loop over it has."""
        x = (self.equation.invars if self.name in _REDUCTIONS else self.equation.outvars)[0].aval
        return tuple(size for size in getattr(x, "shape", ()) if size > 1)

    @property
    def exchanges(self) -> bool:
        """Whether it sends tokens to other devices."""
        return self.name in COLLECTIVES and self.scope.endswith(("dispatch", "combine"))

    @property
    def turns(self) -> bool:
        """Whether it gives an array another order of dimensions."""
        order = self.equation.params.get("permutation", ()) if self.name == "transpose" else ()
        return tuple(order) != tuple(range(len(order)))


def _together(*steps: _Step) -> _Step:
    """Return several results of one loop as one operation."""
    reads, makes = (tuple(itertools.chain(*each)) for each in zip(*((x.reads, x.makes) for x in steps), strict=True))
    return steps[0]._replace(name=_TOGETHER, reads=reads, makes=makes)


def widest(loop: JaxprEqn, platform: str) -> Held:
    """Return what one iteration of a loop holds at its widest point, without what it reads and carries.

    Args:
        loop: A scan, a loop that ends on a condition, or a conditional, of one device.
        platform: What it is compiled for.
    """
    count, carried = loop.params.get("body_nconsts", len(loop.invars)), len(loop.outvars)
    if loop.primitive.name == "scan":
        count, carried = scan_counts(loop)
    bodies = jax.tree.leaves(loop.params[_LOOPS[loop.primitive.name]], is_leaf=_is_program)
    return max((_Body(each.jaxpr, platform, count, carried).widest() for each in bodies), key=lambda held: held.bytes)


class _Arrays(NamedTuple):
    """The arrays of a body.

    Attributes:
        own: What has to be an array.
        of: Value -> the arrays that it is made of.
        made: Array -> the number of the step that makes it.
        last: Array -> the number of the last step that reads it.
        sources: Array -> the arrays that it is made of.
    """

    own: set[int]
    of: dict[int, frozenset[int]]
    made: dict[int, int]
    last: dict[int, int]
    sources: dict[int, frozenset[int]]


class _Body:
    """The body of a loop as steps between numbered arrays, those of inner programs without a loop among them."""

    def __init__(self, program: Any, platform: str, constants: int, carried: int):
        self.platform, self.bytes, self.steps = platform, list[int](), list[_Step]()
        given = {x: self._new(x) for x in (*program.invars, *program.constvars)}
        self.given = frozenset(given.values())
        self.slices = {given[x] for x in program.invars[constants + carried :]}
        self.carried = {given[x] for x in program.invars[constants : constants + carried]}
        names: dict[Any, int | None] = {**given}
        self._equal, self._numbers = dict[Any, tuple[int, ...]](), dict[Any, str]()
        self._read(program, names, "")
        results = [names.get(x) for x in program.outvars if not isinstance(x, Literal)]
        self.results = {x for x in results[:carried] if x is not None}
        self.stacked = {x for x in results[carried:] if x is not None} - self.results
        self._drop_unused()
        if platform == "tpu":
            self._join()
            self._reorder()
        if platform == "cpu" and sum(bool(each.params.get("differentiated")) for each in program.eqns) > 1:
            self._advance()
        self.maker = {x: step for step in self.steps for x in step.makes}
        self.names = dict.fromkeys(self.slices, "parts of larger arrays")

    def _new(self, x: Any) -> int:
        on_host = getattr(x.aval, "memory_space", None) == jax.memory.Space.Host
        width = getattr(getattr(x.aval, "dtype", None), "itemsize", 0)
        self.bytes.append(0 if on_host else getattr(x.aval, "size", 0) * width)
        return len(self.bytes) - 1

    def _read(self, program: Any, names: dict[Any, int | None], path: str) -> None:
        for each in program.eqns:
            here, kind = f"{path}/{each.source_info.name_stack}", each.primitive.name
            read = [None if isinstance(x, Literal) else names[x] for x in each.invars]
            inner = branch_for(each, self.platform)
            given = read[1:] if inner is not None else read
            if kind == "scan" and each.params["length"] == 1 and self.platform == "cpu":
                inner = each.params["jaxpr"]
            if kind == _BARRIER or (kind in _MARKS and self.platform == "cpu"):
                self._pass_on(each.outvars, each.invars, read)
                names |= zip(each.outvars, self._behind_barrier(each, read, here), strict=True)
                continue
            if inner is None and kind not in _LOOPS and kind not in _KERNELS and not kind.startswith(_COMBINING):
                inner = next((x for x in each.params.values() if isinstance(x, ClosedJaxpr | Jaxpr)), None)
            if inner is not None:
                body: Any = getattr(inner, "jaxpr", inner)
                self._pass_on(body.invars, each.invars[len(read) - len(given) :], given)
                if each.params.get("differentiated") and each.params["prevent_cse"]:
                    given = self._behind_barrier(each, given, here)
                own = dict(zip(body.invars, given, strict=True)) | {x: self._new(x) for x in body.constvars}
                self._read(body, own, here)
                names |= {
                    x: self._new(x) if isinstance(y, Literal) or own[y] is None else own[y]
                    for x, y in zip(each.outvars, body.outvars, strict=True)
                }
                continue
            key = self._key(each, read)
            if key in self._equal:
                names |= zip(each.outvars, self._equal[key], strict=True)
                continue
            makes = {x: self._new(x) for x in each.outvars}
            names |= makes
            if key:
                self._equal[key] = tuple(makes.values())
            scope = Equation(each, None, {}, here).scope
            reads = tuple(x for x in read if x is not None)
            written = zip(makes.values(), read[_first_carried(each) :], strict=False)
            places = {
                x: y
                for x, y in itertools.islice(written, scan_counts(each)[1] if kind == "scan" else None)
                if y is not None
            }
            body = widest(each, self.platform).bytes if kind in _LOOPS else 0
            self.steps.append(_Step(kind, each, reads, tuple(makes.values()), scope, body, places, self.platform))

    def _pass_on(self, names: Sequence[Any], values: Sequence[Any], read: Sequence[int | None]) -> None:
        """Remember the numbers among `values`, which `names` are the names of inside an inner program."""
        given = zip(names, values, read, strict=True)
        self._numbers |= {x: self._number(y) for x, y, array in given if array is None}

    def _number(self, x: Any) -> str:
        return str(x.val) if isinstance(x, Literal) else self._numbers[x]

    def _behind_barrier(self, each: JaxprEqn, read: list[int | None], path: str) -> list[int | None]:
        """Return the same arrays as they are when the last of them is there. A CPU has no barriers."""
        if self.platform == "cpu":
            return read
        behind = dict[int | None, int | None]()
        for x in dict.fromkeys(x for x in read if x is not None):
            self.bytes.append(self.bytes[x])
            behind[x] = len(self.bytes) - 1
        reads, makes = (tuple(x for x in given if x is not None) for given in (behind, behind.values()))
        scope = Equation(each, None, {}, path).scope
        self.steps.append(_Step(_BARRIER, each, reads, makes, scope, 0, {}, self.platform))
        return [behind.get(x) for x in read]

    def _key(self, each: JaxprEqn, read: Sequence[int | None]) -> tuple[Any, ...]:
        """Return what equal operations have in common if a compiler does them once, which is known of a CPU alone."""
        kind = each.primitive.name
        if self.platform != "cpu" or kind in _LOOPS or kind in _KERNELS or kind in COLLECTIVES or each.effects:
            return ()
        operands = (self._number(x) if y is None else y for x, y in zip(each.invars, read, strict=True))
        return kind, str(sorted(each.params.items(), key=lambda item: item[0])), *operands

    def _drop_unused(self) -> None:
        used, kept = self.results | self.stacked, list[_Step]()
        for step in reversed(self.steps):
            if used & set(step.makes) or step.equation.effects:
                used |= set(step.reads)
                kept.append(step)
        self.steps = kept[::-1]

    def widest(self) -> Held:
        """Return the widest point."""
        made, last = self._lives()
        starts, ends = defaultdict[int, list[int]](list), defaultdict[int, list[int]](list)
        for x, number in made.items():
            if x not in self.stacked or x in self.slices:
                starts[number].append(x)
                ends[last.get(x, number)].append(x)
        held, now, most = set[int](), 0, Held(0, {})
        for number, step in enumerate(self.steps):
            if step.joins:  # in place of what ends here
                sizes = [self.bytes[x] for x in starts[number]]
                for x in held & set(ends[number]):
                    if self.bytes[x] in sizes:
                        sizes.remove(self.bytes[x])
                        held.remove(x)
                        now -= self.bytes[x]
            held.update(starts[number])
            now += sum(self.bytes[x] for x in starts[number])
            if now + step.body > most.bytes:
                most = Held(now + step.body, self._parts(held, step))
            gone = held & set(ends[number])
            held -= gone
            now -= sum(self.bytes[x] for x in gone)
        return most

    def _parts(self, held: set[int], step: _Step) -> dict[str, int]:
        found = defaultdict[str, int](int)
        for x in held:
            found[self.names.get(x) or _part(self.maker[x].scope)] += self.bytes[x]
        if step.body:
            found[_part(step.scope)] += step.body
        return dict(found)

    def _lives(self) -> tuple[dict[int, int], dict[int, int]]:
        """Return for each array the number of the step that makes it, and that of the last that reads it."""
        own, of, made, last, _ = self._arrays()
        for x in self.results:
            last |= dict.fromkeys(of.get(x, ()), len(self.steps))
        if self.platform != "tpu":  # zeros, which the loop writes over
            made |= {x: 0 for step in self.steps if step.name == "scan" for x in step.stacks if x in made}
        if self.platform == "tpu":
            self._delay(own, of, made, last)
        else:
            self._keep_gradients(of, made, last)
        if self.platform == "cpu":
            self._weights(of, made, last)
        return made, last

    def _arrays(self) -> _Arrays:
        """Return the arrays in the order of the steps."""
        own, turned = self._read_as_arrays()
        uses = defaultdict[int, int](int)
        for step in self.steps:
            for x in set(step.reads):
                uses[x] += 1
        of = {x: frozenset((x,)) for x in self.given}  # value -> the arrays that it is made of
        made, last, sources = dict[int, int](), dict[int, int](), dict[int, frozenset[int]]()
        read_last = {x: number for number, step in enumerate(self.steps) for x in step.reads}
        for number, step in enumerate(self.steps):
            read = frozenset[int]().union(*(of[x] for x in step.reads if x in of))
            for x in read:
                last[x] = number
                if x in self.slices and x in own:
                    made[x] = 0
            for x in step.makes:
                kept = x in own or x in self.results or x in self.stacked
                once = uses[x] > 1 and self._makes_once(step, x, of)
                place = step.places.get(x, -1)
                written = of.get(place, frozenset())
                if step.name == _BARRIER:
                    of[x] = of.get(step.reads[step.makes.index(x)], frozenset())
                elif step.name in SAME and x not in turned:
                    of[x] = read
                elif written and read_last[place] == number and written <= made.keys() | self.carried:
                    of[x] = written
                elif not step.joins or step.ends_loop or (read and (kept or once)):
                    of[x], made[x], sources[x] = frozenset((x,)), number, read
                else:
                    of[x] = read
        return _Arrays(own, of, made, last, sources)

    def _makes_once(self, step: _Step, x: int, of: Mapping[int, frozenset[int]]) -> bool:
        """Return whether a compiler makes an elementwise result once for several operations that read it."""
        operands = [of.get(y, frozenset()) for y in set(step.reads)]
        if self.platform == "cpu":
            wide = [y for y in operands if 2 * sum(self.bytes[z] for z in y) >= self.bytes[x]]
            return len(wide) > 1 or (step.name in _COSTLY and len(wide) == 1)
        large = [self.bytes[y] for y in frozenset().union(*operands) if 2 * self.bytes[y] >= self.bytes[x]]
        return len(large) > 1 and sum(large) > self.bytes[x]

    def _read_as_arrays(self) -> tuple[set[int], set[int]]:
        """Return what operations read that join with nothing, and those of it that have to be turned."""
        own, turned, strict = set[int](), set[int](), set[int]()
        for step in reversed(self.steps):
            if not step.joins:
                own.update(step.reads)
                if step.name != "dot_general":
                    strict.update(step.reads)
            elif step.name == _BARRIER:
                for x, y in zip(step.makes, step.reads, strict=True):
                    own |= own & {x} and {y}
                    strict |= strict & {x} and {y}
            elif step.name in SAME:
                if own & set(step.makes):
                    own.update(step.reads)
                if strict & set(step.makes):
                    if step.turns:
                        turned.update(step.makes)
                    else:
                        strict.update(step.reads)
        return own, turned

    def _join(self) -> None:
        """Make together, and when the last of what they read is there, results that a TPU makes in one loop."""
        maker = {x: number for number, step in enumerate(self.steps) for x in step.makes}
        needs = [{maker[x] for x in step.reads if x in maker} for step in self.steps]
        before = list[int]()  # bits: which steps a step needs
        for each in needs:
            before.append(_union(before[n] | 1 << n for n in each))
        group: list[tuple[int, ...]] = [(n,) for n in range(len(self.steps))]
        for pair in self._alike():
            one, other = (group[maker[x]] for x in pair)
            both = (*one, *other)
            members, earlier = _union(1 << n for n in both), _union(before[n] for n in both)
            if one != other and not members & earlier:
                before = [x | members | earlier if x & members else x for x in before]
                for n in both:
                    group[n], before[n] = both, earlier
        order = dict[tuple[int, ...], None]()
        for each in group:
            waiting = [each]
            while waiting:
                missing = {group[m] for n in waiting[-1] for m in needs[n]} - order.keys()
                if missing:
                    waiting += sorted(missing, reverse=True)
                else:
                    order[waiting.pop()] = None
        steps = ([self.steps[n] for n in each] for each in order)
        self.steps = [_together(*each) if len(each) > 1 else each[0] for each in steps]

    def _alike(self) -> list[tuple[int, int]]:
        """Return pairs of results of equal loops that share what they read: sums first, then by the bytes shared."""
        found, loops = self._arrays(), defaultdict[tuple[int, ...], list[int]](list)
        sums, equal, reads = dict[Any, int](), dict[int, int](), dict[int, set[int]]()
        kept = found.own | self.results | self.stacked
        for x, read in found.sources.items():
            step = self.steps[found.made[x]]
            reads[x] = {equal.get(y, y) for y in read}
            if step.ends_loop:  # equal sums are made once
                equal[x] = sums.setdefault((step.name, step.equation.params["axes"], *sorted(reads[x])), x)
            small = all(self.bytes[y] < _LARGE for y in read)
            if step.joins and not step.turns and small and (x in kept or step.ends_loop):
                loops[step.loop].append(x)
        pairs = list[tuple[bool, int, int, int]]()
        for one, other in itertools.chain(*(itertools.combinations(each, 2) for each in loops.values())):
            if shared := reads[one] & reads[other]:
                are_sums = all(self.steps[found.made[x]].ends_loop for x in (one, other))
                pairs.append((not are_sums, -sum(self.bytes[x] for x in shared), one, other))
        return [(one, other) for *_, one, other in sorted(pairs)]

    def _advance(self) -> None:
        """Make first what does not need what the loop carries, of all layers of an iteration."""
        waits, late = set(self.carried), set[int]()
        for number, step in enumerate(self.steps):
            if waits.intersection(step.reads):
                waits.update(step.makes)
                late.add(number)
        order = sorted(range(len(self.steps)), key=lambda number: (number in late, number))
        self.steps = [self.steps[number] for number in order]

    def _reorder(self) -> None:
        """Make the gradients of weights, and what only they need, when a TPU does."""
        readers = defaultdict[int, list[int]](list)
        for number, step in enumerate(self.steps):
            for x in set(step.reads):
                readers[x].append(number)
        apart = set[int]()  # steps that nothing but such steps read
        for number, step in reversed(list(enumerate(self.steps))):
            if not self.results & set(step.makes) and all(apart.issuperset(readers[x]) for x in step.makes):
                apart.add(number)
        maker = {x: number for number, step in enumerate(self.steps) for x in step.makes}
        place, begun = dict[int, int](), set[int]()
        for number, step in enumerate(self.steps):
            place[number] = number
            if number in apart:
                before = [maker[x] for x in step.reads if x in maker]
                place[number] = max((place[x] for x in before), default=-1)
                first = not step.joins and not begun.intersection(before)
                if first and not self._frees(number, place[number], readers):
                    place[number] = len(self.steps)
                if first or begun.intersection(before):
                    begun.add(number)
        order = sorted((at, number in apart, number) for number, at in place.items())
        self.steps = [self.steps[number] for *_, number in order]

    def _frees(self, number: int, ready: int, readers: Mapping[int, list[int]]) -> bool:
        """Return whether a step frees more than it makes if it runs as soon as all that it reads is there."""
        step = self.steps[number]
        ends = (x for x in set(step.reads) if all(each <= ready for each in readers[x] if each != number))
        freed, made = (sum(self.bytes[x] for x in found) for found in (ends, step.makes))
        return freed >= made and not any(each.exchanges for each in self.steps)

    def _delay(
        self, own: set[int], of: Mapping[int, frozenset[int]], made: dict[int, int], last: dict[int, int]
    ) -> None:
        """Make elementwise results when a TPU does. `own`: what has to be an array."""
        readers = defaultdict[int, list[int]](list)
        for number, step in enumerate(self.steps):
            for x in {y for value in step.reads for y in of.get(value, ())}:
                readers[x].append(number)
        fixed = self.given | self.results | self.stacked
        joined = [x for x in made if x not in fixed and self.maker[x].joins and not self.maker[x].ends_loop]
        sources = {x: {y for value in self.maker[x].reads for y in of.get(value, ())} & made.keys() for x in joined}
        for x in sorted(joined, key=own.__contains__):
            later, then = [each for each in readers[x] if each > made[x]], made[x]
            if x not in own:  # with the first array that is made of it; it is none if that is the only one
                later = [n for n in later if made.keys() & set(self.steps[n].makes) or not self.steps[n].joins]
                then = later[0] if later else then
            elif sources[x] and later and all(last[y] > then for y in sources[x]):
                ends = min(last[y] for y in sources[x]) + 1
                then = ends if ends <= later[0] else then
            if then > made[x]:
                made[x] = then
                last |= {y: max(last[y], then) for y in sources[x]}
                if x not in own and len(later) == 1:
                    del made[x]

    def _keep_gradients(self, of: Mapping[int, frozenset[int]], made: dict[int, int], last: dict[int, int]) -> None:
        """Make what is summed over devices where the gradient is made that it is a copy of.

        On a GPU it stays until the next iteration, beside that of the layer before.
        """
        for step in self.steps:
            kind = COLLECTIVES.get(step.name)
            if kind in ("psum", "reduce_scatter") and step.scope.endswith("weights"):
                for x in {x for value in step.reads for x in of[value]}:
                    copies = list(self._copies(x, of, made))
                    first = made[copies[-1]] if copies else 0
                    made |= dict.fromkeys(copies, first)
                    if kind == "reduce_scatter" and self.platform == "cuda" and copies:
                        last |= {**dict.fromkeys(copies, first), x: len(self.steps)}
                        self.bytes[x] *= 2
                    self.names |= dict.fromkeys(copies, "gradients of weights")

    def _weights(self, of: Mapping[int, frozenset[int]], made: Mapping[int, int], last: dict[int, int]) -> None:
        """Keep the weights that are gathered together until the last of them is used."""
        groups, found = list[set[int]](), dict[int, int]()
        begins = True
        for step in self.steps:
            if COLLECTIVES.get(step.name) == "all_gather" and step.scope.endswith("weights"):
                if begins:
                    groups.append(set())
                found |= dict.fromkeys(step.makes, len(groups) - 1)
                begins = False
            elif not step.joins and not step.scope.endswith("weights"):
                begins = True
                for x in {y for value in step.reads for y in of.get(value, ()) if y in made}:
                    *_, first = self._copies(x, of, made)
                    if first in found:
                        groups[found[first]].add(x)
        for group in groups:
            last |= dict.fromkeys(group, max((last[x] for x in group), default=0))
            self.names |= dict.fromkeys(group, "gathered weights")

    def _copies(self, x: int, of: Mapping[int, frozenset[int]], made: Mapping[int, int]) -> Iterator[int]:
        """Yield an array, what it is a copy of in another dtype or order, and so on."""
        while x in made:
            yield x
            if x in self.given:
                return
            step = self.maker[x]
            before = frozenset[int]().union(*(of.get(y, frozenset()) for y in step.reads))
            if not step.joins or step.ends_loop or len(before) != 1 or x in before:
                return
            (x,) = before


def _union(bits: Iterable[int]) -> int:
    return functools.reduce(int.__or__, bits, 0)


def _first_carried(each: JaxprEqn) -> int:
    """Return the number of the operand in whose place the first result of an operation is written."""
    kind, counts = each.primitive.name, each.params
    if kind == "scan":
        return scan_counts(each)[0]
    if kind == "while":
        return counts["cond_nconsts"] + counts["body_nconsts"]
    return 0 if kind == "dynamic_update_slice" or kind.startswith("scatter") else len(each.invars)


def _part(scope: str) -> str:
    """Return the name for arrays that are made in a named scope: that of a part of a layer."""
    return f"arrays of {'/'.join(scope.split('/')[:2]) or 'the layer'}"


def _is_program(x: Any) -> bool:
    return isinstance(x, ClosedJaxpr | Jaxpr)
