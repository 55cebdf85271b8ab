"""Records of chats in every form that people have them in, and the messages that they are, by hand."""

import json
from typing import Any

ASKED, SAID = {"role": "user", "content": "1+2?"}, {"role": "assistant", "content": "3"}
BRIEF, PARTS = {"role": "system", "content": "Be brief."}, [{"type": "text", "text": "3"}]
FORMS: dict[str, tuple[Any, list[Any]]] = {
    "messages": ({"messages": [ASKED, SAID]}, [ASKED, SAID]),
    "conversations": (
        {"conversations": [{"from": "human", "value": "1+2?"}, {"from": "gpt", "value": "3", "weight": 1}]},
        [ASKED, SAID],
    ),
    "conversation": ({"conversation": json.dumps([ASKED, SAID]), "system": "Be brief."}, [BRIEF, ASKED, SAID]),
    "instruction/output": (
        {"instruction": "1+2?", "input": "", "output": "3", "system": "Be brief."},
        [BRIEF, ASKED, SAID],
    ),
    "instruction/response": (
        {"instruction": "1", "context": "+2?", "response": "3"},
        [{**ASKED, "content": "1\n\n+2?"}, SAID],
    ),
    "query/response": ({"query": "1+2?", "response": "3", "system": None}, [ASKED, SAID]),
    "question/answer": ({"answer": "3", "question": "1+2?", "messages": None}, [ASKED, SAID]),
    "prompt/completion": (
        {"prompt": [BRIEF, ASKED], "completion": [SAID], "system": "Be brief."},
        [BRIEF, ASKED, SAID],
    ),
    "a list of messages": (
        [ASKED, {**SAID, "content": [{"type": "text", "text": "3"}]}],
        [ASKED, {**SAID, "content": [{"type": "text", "text": "3"}]}],
    ),
}
