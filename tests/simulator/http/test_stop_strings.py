"""Stop strings end answers, and no part of a stop string is sent."""

from hypothesis import given
from hypothesis import strategies as st

from kvatlas_simulator.http.stop_strings import StopStrings

LETTERS = st.text(alphabet="ab ", max_size=12)


@given(LETTERS, st.lists(st.text(alphabet="ab ", min_size=1, max_size=3), max_size=3))
def test_the_text_ends_before_the_first_stop_string(text: str, stops: list[str]) -> None:
    read, sent = StopStrings(stops), ""
    for at, letter in enumerate(text):
        sent += read.feed(letter, last=at == len(text) - 1)
        if read.matched is not None:
            break
    ends = [end for end in range(len(text) + 1) if any(text[:end].endswith(stop) for stop in stops)]
    if not ends:
        assert sent == text and read.matched is None
    else:
        assert read.matched is not None and text[: ends[0]] == sent + read.matched
