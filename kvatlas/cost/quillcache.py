"""Cost profile `quillcache`: fixed coefficients, whole microseconds.

prefill   45 a new token                     queue    4 a queued prefill token
decode    80 a token + 1,500 a running decode
hit       a piece in the worker's own HBM: flat 5
          any other piece: tier price x MiB (rounded up, at least 1)
              remote HBM 20, CPU DRAM 55, local SSD 280, object store 1,800; HBM of another worker is remote HBM
domain    350 a piece from another locality domain
"""

from dataclasses import dataclass, fields

from kvatlas.cost.plan import Cost, CostTerm, Piece, Plan
from kvatlas.errors import InvalidValue
from kvatlas.tiers import Tier


@dataclass(frozen=True, slots=True)
class QuillcacheProfile:
    """See the module. All coefficients can be set; raises InvalidValue for a negative one."""

    prefill_us_per_token: int = 45
    decode_us_per_token: int = 80
    queue_us_per_token: int = 4
    running_decode_us: int = 1_500
    hbm_hit_us: int = 5
    remote_hbm_us_per_mib: int = 20
    cpu_dram_us_per_mib: int = 55
    local_ssd_us_per_mib: int = 280
    object_store_us_per_mib: int = 1_800
    domain_us: int = 350

    def __post_init__(self) -> None:
        for name in (coefficient.name for coefficient in fields(self)):
            if getattr(self, name) < 0:
                raise InvalidValue(f"quillcache coefficient {name} is {getattr(self, name)}; expected 0 or more")

    @property
    def name(self) -> str:
        return "quillcache"

    def tier_us_per_mib(self, tier: Tier) -> int:
        """The price of a MiB read from a tier other than the worker's own HBM."""
        match tier:
            case Tier.HBM | Tier.REMOTE_HBM:
                return self.remote_hbm_us_per_mib
            case Tier.CPU_DRAM:
                return self.cpu_dram_us_per_mib
            case Tier.LOCAL_SSD:
                return self.local_ssd_us_per_mib
            case Tier.OBJECT_STORE:
                return self.object_store_us_per_mib

    def read_us(self, piece: Piece) -> int:
        """The price of one piece, with the domain penalty."""
        if piece.at_hand:
            return self.hbm_hit_us
        us = self.tier_us_per_mib(piece.price_tier) * piece.mib
        return us if piece.own or piece.same_domain else us + self.domain_us

    def price(self, plan: Plan) -> Cost:
        at_hand = [piece for piece in plan.pieces if piece.at_hand]
        moved = [piece for piece in plan.pieces if not piece.at_hand]
        crossing = sum(not (piece.own or piece.same_domain) for piece in moved)
        new, load = plan.new_tokens, plan.load
        moved_us = sum(self.tier_us_per_mib(piece.price_tier) * piece.mib for piece in moved)
        queued, running = load.queued_prefill_tokens, load.running_decodes
        terms = (
            CostTerm("prefill", self.prefill_us_per_token * new, new, "new tokens"),
            CostTerm("hbm_hit", self.hbm_hit_us * len(at_hand), len(at_hand), "pieces"),
            CostTerm("transfer", moved_us, sum(piece.mib for piece in moved), "MiB"),
            CostTerm("domain", self.domain_us * crossing, crossing, "crossings"),
            CostTerm("queue", self.queue_us_per_token * queued, queued, "queued tokens"),
            CostTerm("decode", self.decode_us_per_token * plan.output_tokens, plan.output_tokens, "tokens"),
            CostTerm("running", self.running_decode_us * running, running, "running decodes"),
        )
        return Cost(self.name, terms, sum(term.us for term in terms))
