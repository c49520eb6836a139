"""Answers as text continue from any part of them."""

from kvatlas_simulator.engine.tokenizer import TextAnswer, decode, encode

PROMPT = encode("Zürich: who holds it?")


def test_a_text_answer_goes_on_behind_any_part_of_it() -> None:
    answer = TextAnswer("m", PROMPT, 0)
    tokens = [answer[index] for index in range(40)]
    for sent in range(40):
        rest = TextAnswer("m", [*PROMPT, *tokens[:sent]], 0)
        assert [rest[index] for index in range(40 - sent)] == tokens[sent:]
        assert encode(decode(tokens[:sent])) == tokens[:sent]


def test_other_prompts_models_and_choices_have_other_answers() -> None:
    asked = [("m", PROMPT, 0), ("n", PROMPT, 0), ("m", PROMPT, 1), ("m", PROMPT[1:], 0)]
    answers = [TextAnswer(model, prompt, choice) for model, prompt, choice in asked]
    assert len({tuple(answer[index] for index in range(20)) for answer in answers}) == 4
