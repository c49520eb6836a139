"""Cost profile `quillcache`: fixed coefficients, in whole microseconds.

prefill   45 per new token                   queue    4 per queued prefill token
decode    80 per token + 1,500 per running decode
hit       a piece in the worker's own HBM: flat 5
          any other piece: tier price × MiB (rounded up, at least 1)
              remote HBM 20, CPU DRAM 55, local SSD 280, object store 1,800; HBM of another worker is remote HBM
domain    350 per piece from another locality domain
"""

from dataclasses import dataclass, fields

from kvatlas.blocks.tiers import Tier
from kvatlas.cost.protocol import Cost, Piece, Plan, Prices, TermKind
from kvatlas.errors import InvalidValue

TERMS = (
    TermKind("prefill", "new tokens"),
    TermKind("hbm_hit", "pieces"),
    TermKind("transfer", "MiB"),
    TermKind("domain", "crossings"),
    TermKind("queue", "queued tokens"),
    TermKind("decode", "tokens"),
    TermKind("running", "running decodes"),
)


@dataclass(frozen=True, slots=True)
class QuillcacheProfile:
    """The profile that this module describes. Every coefficient can be set; a negative one raises InvalidValue."""

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

    def prefill_us(self, new_tokens: int) -> int:
        """The cost of computing prompt tokens."""
        return self.prefill_us_per_token * new_tokens

    def decode_us(self, output_tokens: int, running_decodes: int = 0) -> int:
        """The cost of decoding an answer alongside the requests that the worker is already decoding."""
        return self.decode_us_per_token * output_tokens + self.running_decode_us * running_decodes

    def queue_us(self, queued_prefill_tokens: int) -> int:
        """The cost of waiting behind prompt tokens that have yet to be computed."""
        return self.queue_us_per_token * queued_prefill_tokens

    def transfer_us(self, size_bytes: int, tier: Tier, *, own: bool = True, same_domain: bool = True) -> int:
        """The cost of reading cached KV of this size in one piece; reading from the worker's own HBM is a hit."""
        return self.read_us(Piece(0, size_bytes, tier, own, same_domain))

    def tier_us_per_mib(self, tier: Tier) -> int:
        """The price of reading one MiB from a tier other than the worker's own HBM."""
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
        """The price of one piece, including the domain penalty."""
        if piece.at_hand:
            return self.hbm_hit_us
        us = self.tier_us_per_mib(piece.price_tier) * piece.mib
        return us if piece.own or piece.same_domain else us + self.domain_us

    def price(self, plan: Plan) -> Cost:
        at_hand = moved_us = moved_mib = crossing = 0
        for piece in plan.pieces:
            if piece.at_hand:
                at_hand += 1
                continue
            moved_us += self.tier_us_per_mib(piece.price_tier) * piece.mib
            moved_mib += piece.mib
            crossing += not (piece.own or piece.same_domain)
        new, output = plan.new_tokens, plan.output_tokens
        queued, running = plan.load.queued_prefill_tokens, plan.load.running_decodes
        us = (
            self.prefill_us(new),
            self.hbm_hit_us * at_hand,
            moved_us,
            self.domain_us * crossing,
            self.queue_us(queued),
            self.decode_us(output),
            self.decode_us(0, running),
        )
        amounts = (new, at_hand, moved_mib, crossing, queued, output, running)
        return Cost(self.name, TERMS, us, amounts, sum(us))

    def prices(self, plan: Plan) -> Prices:
        token_us, hit_us = self.prefill_us_per_token, self.hbm_hit_us
        return Prices(self.queue_us_per_token, self.running_decode_us, 0.0, 0, token_us, hit_us=hit_us)

    def alike(self, worker_id: str) -> None:
        """None for every worker, because the prices are the same for all of them."""
