"""Cost profile `engine`, the default: the time that the engine will actually spend, according to the worker's rates.

    TTFT  = backlog / prefill rate + transfer + prefill(new tokens, cached tokens)
    TPOT  = t0 + t1 × running requests + t2 × KV tokens
    score = TTFT + expected output tokens × TPOT

The default rates are those of a model with 8 billion parameters and grouped-query attention (32 layers, hidden size 4,096, 8 KV
heads of 128, 16-bit) on one accelerator that achieves about 400 TFLOP/s and 3 TB/s in practice:

- a prompt token takes 16 GFLOP: 40 us; attention adds 4 × 4,096 × 32 FLOP for each token that it attends to: 0.0013 us.
- a decode step reads 16 GB of weights: 5,300 us, or 7,000 us with the launch overhead (t0); each running request adds its own
  compute and sampling: 40 us (t1); for each KV token, 128 KiB have to be read: 0.045 us (t2).
- a transfer has a set-up time and a bandwidth: remote HBM 100 us and 40 GiB/s; CPU DRAM 50 us and 20 GiB/s; local SSD 200 us
  and 5 GiB/s; object store 20,000 us and 0.8 GiB/s. Data from another worker's lower tier also crosses the network. A shared
  store may state its own read rate.

Only the differences between candidates matter for a choice. Rates can be set for the pool and for each worker.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from kvatlas.blocks.tiers import Tier
from kvatlas.cost.protocol import MIB_BYTES, Cost, Piece, Plan, Prices, ReadRate, TermKind
from kvatlas.errors import InvalidValue

TERMS = (
    TermKind("backlog", "queued tokens"),
    TermKind("transfer", "tokens"),
    TermKind("prefill", "new tokens"),
    TermKind("decode_steps", "tokens"),
    TermKind("decode_running", "running requests"),
    TermKind("decode_kv", "KV tokens"),
)


_REMOTE_HBM = ReadRate(100.0, 25.0)
_CPU_DRAM = ReadRate(50.0, 50.0)
_LOCAL_SSD = ReadRate(200.0, 200.0)
_OBJECT_STORE = ReadRate(20_000.0, 1_250.0)


@dataclass(frozen=True, slots=True)
class EngineRates:
    """One worker's rates; the module docstring explains the defaults. Raises InvalidValue for a negative rate.

    `tokens_per_waiting_request` stands in for queued tokens if an engine reports only how many requests are waiting.
    `kv_bytes_per_token` gives the size of a transfer if the fleet record has no block bytes.
    """

    prefill_us_per_token: float = 40.0
    attention_us_per_token_pair: float = 0.0013
    tpot_base_us: float = 7_000.0
    tpot_us_per_running: float = 40.0
    tpot_us_per_kv_token: float = 0.045
    tokens_per_waiting_request: int = 1_024
    kv_bytes_per_token: int = 131_072
    remote_hbm: ReadRate = _REMOTE_HBM
    cpu_dram: ReadRate = _CPU_DRAM
    local_ssd: ReadRate = _LOCAL_SSD
    object_store: ReadRate = _OBJECT_STORE
    domain_us: float = 350.0

    def __post_init__(self) -> None:
        for name in (rate.name for rate in fields(self)):
            value = getattr(self, name)
            if not isinstance(value, ReadRate) and not value >= 0:
                raise InvalidValue(f"engine rate {name} is {value}; expected 0 or more")

    def read_rate(self, tier: Tier) -> ReadRate:
        """The read rate for a tier other than the worker's own HBM."""
        match tier:
            case Tier.HBM | Tier.REMOTE_HBM:
                return self.remote_hbm
            case Tier.CPU_DRAM:
                return self.cpu_dram
            case Tier.LOCAL_SSD:
                return self.local_ssd
            case Tier.OBJECT_STORE:
                return self.object_store

    def prefill_us(self, new_tokens: int, cached_tokens: int) -> float:
        """The time that it takes to compute `new_tokens` after `cached_tokens`: each attends to all tokens before it."""
        pairs = new_tokens * (cached_tokens + new_tokens / 2)
        return self.prefill_us_per_token * new_tokens + self.attention_us_per_token_pair * pairs

    def tpot_us(self, running: int, kv_tokens: int) -> float:
        """The time from one token to the next while `running` requests hold `kv_tokens` tokens of KV."""
        return self.tpot_base_us + self.tpot_us_per_running * running + self.tpot_us_per_kv_token * kv_tokens

    def read_us(self, piece: Piece) -> float:
        """The time that it takes to read one piece; 0 for a piece that is at hand."""
        if piece.at_hand:
            return 0.0
        mib = (piece.bytes or piece.tokens * self.kv_bytes_per_token) / MIB_BYTES
        rate = piece.rate or self.read_rate(piece.price_tier)
        us = rate.setup_us + rate.us_per_mib * mib
        if piece.rate is None and not piece.own and piece.price_tier is not Tier.REMOTE_HBM:
            us += self.remote_hbm.us_per_mib * mib
        return us if piece.own or piece.same_domain else us + self.domain_us


@dataclass(frozen=True, slots=True)
class EngineProfile:
    """The profile that this module describes. `by_worker`: the rates of individual workers; `rates`: those of all others."""

    rates: EngineRates = EngineRates()
    by_worker: Mapping[str, EngineRates] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return "engine"

    def price(self, plan: Plan) -> Cost:
        rates = self.by_worker.get(plan.worker_id, self.rates)
        load, output = plan.load, plan.output_tokens
        backlog = load.queued_prefill_tokens + load.waiting_requests * rates.tokens_per_waiting_request
        cached = moved_tokens = 0
        moved_us = 0.0
        for piece in plan.pieces:
            cached += piece.tokens
            if not piece.at_hand:
                moved_tokens += piece.tokens
                moved_us += rates.read_us(piece)
        new = plan.input_tokens - cached
        running, kv_tokens = load.running_decodes + 1, load.kv_tokens + plan.input_tokens
        running_us, kv_us = rates.tpot_us_per_running * running, rates.tpot_us_per_kv_token * kv_tokens
        us = (
            round(rates.prefill_us_per_token * backlog),
            round(moved_us),
            round(rates.prefill_us(new, cached)),
            round(output * rates.tpot_base_us),
            round(output * running_us),
            round(output * kv_us),
        )
        amounts = (backlog, moved_tokens, new, output, running, kv_tokens)
        tpot_us = round(rates.tpot_base_us + running_us + kv_us)
        return Cost(self.name, TERMS, us, amounts, sum(us), us[0] + us[1] + us[2], tpot_us)

    def prices(self, plan: Plan) -> Prices:
        rates = self.by_worker.get(plan.worker_id, self.rates)
        return Prices(
            rates.prefill_us_per_token,
            plan.output_tokens * rates.tpot_us_per_running,
            plan.output_tokens * rates.tpot_us_per_kv_token,
            rates.tokens_per_waiting_request,
            rates.prefill_us_per_token,
            rates.attention_us_per_token_pair / 2,
        )

    def alike(self, worker_id: str) -> int:
        """Workers that share a rates object are alike. Comparing rates would take longer than one more quote does."""
        return id(self.by_worker.get(worker_id, self.rates))
