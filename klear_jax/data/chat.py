# SPDX-License-Identifier: Apache-2.0
"""Qwen3's chat layout: prompts for sampling, and examples with a loss mask for training.

Control tokens are put in by id and the text between them is encoded on its own, so a message that
contains `<|im_end|>` cannot end its turn. For ordinary text the ids equal those of the published
template.
"""

from collections.abc import Sequence

from klear_jax.data.problems import ROLES, Message
from klear_jax.data.tokenizer import IM_END, IM_START, THINK, THINK_END, Tokenizer

EMPTY_THINK = f"{THINK}\n\n{THINK_END}\n\n"


def split_response(text: str) -> tuple[str, str]:
    """Think text and answer of a response, tags removed.

    Think text ends at the first `</think>`, the answer starts after the last. Newlines at the tags
    are dropped. Without `</think>` the think text is empty and the
    answer is the text as it is.
    """
    if THINK_END not in text:
        return "", text
    before, _, _ = text.partition(THINK_END)
    _, _, after = text.rpartition(THINK_END)
    return before.rpartition(THINK)[2].strip("\n"), after.lstrip("\n")


def render_prompt(messages: Sequence[Message], *, thinking: bool = True) -> str:
    """The prompt as text, for people to read. `encode_prompt` gives the ids.

    Args:
        messages: ends with a user message. Earlier assistant turns lose their think text.
        thinking: when False an empty think block is put in, so that the model answers at once.
    """
    turns = "".join(f"{IM_START}{turn}{IM_END}\n" for turn in _prompt_turns(messages))
    return f"{turns}{IM_START}assistant\n{'' if thinking else EMPTY_THINK}"


def encode_prompt(
    tokenizer: Tokenizer, messages: Sequence[Message], *, thinking: bool = True
) -> list[int]:
    """Ids of the prompt, up to and with the assistant header or the empty think block."""
    start, end = tokenizer.token_id(IM_START), tokenizer.end_id
    newline = tokenizer.encode("\n")
    ids: list[int] = []
    for turn in _prompt_turns(messages):
        ids += [start, *tokenizer.encode(turn), end, *newline]
    ids += [start, *tokenizer.encode("assistant\n")]
    return ids if thinking else ids + tokenizer.encode(EMPTY_THINK)


def encode_example(
    tokenizer: Tokenizer, messages: Sequence[Message]
) -> tuple[list[int], list[bool]]:
    """Ids and loss mask of a conversation that ends with an assistant turn.

    The ids before that turn are exactly `encode_prompt` of the messages before it, so training
    sees what sampling sees. The mask is True on the response and its `<|im_end|>`; nothing
    follows it. The response always holds one think block, an empty one when the turn has none.

    Raises:
        ValueError: the last message is not from the assistant.
    """
    if not messages or messages[-1].role != "assistant":
        last = messages[-1].role if messages else None
        raise ValueError(
            f"the last message is from {last!r}; an example must end with an assistant turn"
        )
    prompt = encode_prompt(tokenizer, messages[:-1])
    think, answer = split_response(messages[-1].content)
    body = f"{THINK}\n{think}\n{THINK_END}\n\n" + answer.lstrip("\n")
    response = [*tokenizer.encode(body), tokenizer.end_id]
    return prompt + response, [False] * len(prompt) + [True] * len(response)


def _prompt_turns(messages: Sequence[Message]) -> list[str]:
    """Each turn's text between its control tokens."""
    if not messages or messages[-1].role != "user":
        last = messages[-1].role if messages else None
        raise ValueError(
            f"the last message is from {last!r}; a prompt must end with a user message"
        )
    turns: list[str] = []
    for i, message in enumerate(messages):
        if message.role not in ROLES:
            raise ValueError(
                f"message {i} has role {message.role!r}; expected one of {', '.join(ROLES)}"
            )
        earlier = message.role == "assistant"
        content = split_response(message.content)[1] if earlier else message.content
        turns.append(f"{message.role}\n{content}")
    return turns
