"""The duration of a real engine's scheduler step."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepCost:
    """Rates of a linear model, in microseconds. A step computes prefill chunks together with one token of every decoding
    sequence."""

    prefill_us_per_token: float = 45.0
    decode_step_us: float = 8_000.0
    """Added once per step in which anything decodes: the time to read the weights."""
    decode_us_per_sequence: float = 50.0
    decode_us_per_kv_token: float = 0.02
    """The time to read the KV of one token of a decoding sequence."""
    swap_in_us_per_block: float = 55.0
    attention_us_per_token_pair: float = 0.0
    """Per pair of a computed prompt token and a token before it: attention cost grows quadratically."""
    overhead_us: float = 0.0
    """Added once per step, whatever it computes: the time for scheduling and kernel launches."""

    def step_us(
        self,
        *,
        prefill_tokens: int,
        decode_sequences: int,
        decode_kv_tokens: int,
        swapped_in: int,
        prefill_pairs: float = 0.0,
    ) -> float:
        """Duration of one step in microseconds."""
        return (
            self.overhead_us
            + prefill_tokens * self.prefill_us_per_token
            + prefill_pairs * self.attention_us_per_token_pair
            + (self.decode_step_us if decode_sequences else 0.0)
            + decode_sequences * self.decode_us_per_sequence
            + decode_kv_tokens * self.decode_us_per_kv_token
            + swapped_in * self.swap_in_us_per_block
        )
