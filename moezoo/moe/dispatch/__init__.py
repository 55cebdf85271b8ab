import dataclasses


@dataclasses.dataclass(frozen=True)
class Dispatch:
    pass


@dataclasses.dataclass(frozen=True)
class Dense(Dispatch):
    pass


@dataclasses.dataclass(frozen=True)
class Gather(Dispatch):
    pass


@dataclasses.dataclass(frozen=True)
class Ring(Dispatch):
    pass


STRATEGIES: dict[str, type[Dispatch]] = {"dense": Dense, "gather": Gather, "ring": Ring}
