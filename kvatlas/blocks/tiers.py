"""Memory tiers that can hold a KV block, and the flags byte of a holder entry: one bit for each tier; the other three bits are
0."""

from enum import IntEnum

from kvatlas.errors import InvalidValue, UnknownTier


class Tier(IntEnum):
    """A tier; its value is its bit position in the flags byte. The tier nearest to the processor comes first."""

    HBM = 0
    REMOTE_HBM = 1
    CPU_DRAM = 2
    LOCAL_SSD = 3
    OBJECT_STORE = 4

    @property
    def label(self) -> str:
        """The tier's name as users write and read it."""
        return self.name.lower()

    @property
    def flag(self) -> int:
        return 1 << self


TIER_MASK = (1 << len(Tier)) - 1

_ALIASES: dict[str, Tier] = {
    **{tier.label: tier for tier in Tier},
    **{tier.label.replace("_", ""): tier for tier in Tier},  # RemoteHbm, CpuDram: names of an enumeration's variants
    **dict.fromkeys(("gpu", "gpu_memory", "vram"), Tier.HBM),
    **dict.fromkeys(("remote_gpu", "remote_gpu_memory"), Tier.REMOTE_HBM),
    **dict.fromkeys(("cpu", "dram", "host", "host_memory", "cpu_pinned"), Tier.CPU_DRAM),
    **dict.fromkeys(("ssd", "nvme", "disk", "local_disk"), Tier.LOCAL_SSD),
    **dict.fromkeys(("storage", "object", "obj", "s3", "blob", "external"), Tier.OBJECT_STORE),
    # vLLM 0.26 and later: a file system tier (engine-events: media GPU, CPU, STORAGE, FS, OBJ)
    "fs": Tier.LOCAL_SSD,
}


def parse_tier(name: str) -> Tier:
    """The tier with this name or alias, in upper or lower case; '-' is the same as '_'. Raises UnknownTier for any other name,
    and InvalidValue for a value that is not text."""
    tier = _ALIASES.get(name.strip().lower().replace("-", "_")) if isinstance(name, str) else None
    if tier is None:
        kind = UnknownTier if isinstance(name, str) else InvalidValue
        raise kind(f"unknown tier {name!r}; expected one of {', '.join(sorted(_ALIASES))}")
    return tier


def tiers_of(flags: int) -> tuple[Tier, ...]:
    """The tiers whose bits are set in a flags byte, nearest tier first."""
    return tuple(tier for tier in Tier if flags & tier.flag)


def are_tiers(flags: int) -> bool:
    """True if these are flags of at least one tier and nothing else."""
    return 0 < flags <= TIER_MASK
