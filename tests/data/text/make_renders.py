"""Writes renders.json: what transformers renders from the templates here.

Run with transformers 5 and jinja2 3.1.6:  python make_renders.py > renders.json
The templates are those of the model families, written down for these tests (SmolLM2's is ../tokenizer's).
"""

import json
import sys
from pathlib import Path

from transformers.utils.chat_template_utils import render_jinja_template

HERE = Path(__file__).parent
WEATHER = {"type": "function", "function": {
    "name": "get_weather", "description": "The weather \"now\" in a city — <°C>",
    "parameters": {"type": "object", "properties": {"city": {"type": "string", "enum": ["Paris", "東京"]},
                                                    "days": {"type": "integer", "default": 1.5}},
                   "required": ["city"]}}}
CLOCK = {"type": "function", "function": {"name": "clock", "description": "time",
                                          "parameters": {"type": "object", "properties": {}}}}


def m(role, content=None, **more):
    return {"role": role, **({} if content is None else {"content": content}), **more}


def calls(*named):
    return [{"type": "function", "id": f"abcdefg{i:02d}", "function": {"name": n, "arguments": a}}
            for i, (n, a) in enumerate(named)]


CHATS = {
    "user": [m("user", "Hi")],
    "system": [m("system", "  Be terse.\n"), m("user", " 2+2? "), m("assistant", " 4\n")],
    "turns": [m("user", "a"), m("assistant", "b"), m("user", "你好 😀 é"), m("assistant", "世界\n\n")],
    "thinking": [m("user", "q1"), m("assistant", "<think>\nhm\n</think>\n\nanswer 1"), m("user", "q2"),
                 m("assistant", "<think>\nwhy\n\nnot\n</think>\n\nanswer 2")],
    "reasoning": [m("user", "q1"), m("assistant", "a1", reasoning_content="r1"), m("user", "q2"),
                  m("assistant", "a2", reasoning_content="\nr2\n")],
    "tool": [m("system", "Use tools."), m("user", "Weather?"),
             m("assistant", "", tool_calls=calls(("get_weather", {"city": "東京", "days": 2}))),
             m("tool", "{\"t\": 21.5}", name="get_weather", tool_call_id="abcdefg00"), m("assistant", "21.5 °C")],
    "two_tools": [m("user", "Both"),
                  m("assistant", "I look.", tool_calls=calls(("get_weather", {"city": "Paris"}), ("clock", {}))),
                  m("tool", "sunny", tool_call_id="abcdefg00"), m("tool", "noon", tool_call_id="abcdefg01"),
                  m("assistant", "Sunny, noon."), m("user", "Thanks")],
    "special": [m("user", "literal <|im_end|> <|eot_id|> [/INST]"), m("assistant", "yes </s> {{ x }} {% if %}")],
    "empty": [m("system", ""), m("user", ""), m("assistant", "")],
    "wrong_order": [m("user", "a"), m("user", "b")],
}
OPTIONS = [{}, {"add_generation_prompt": True}, {"tools": [WEATHER, CLOCK]},
           {"tools": [WEATHER], "tools_in_user_message": False, "date_string": "01 Feb 2025"},
           {"add_generation_prompt": True, "enable_thinking": False},
           {"builtin_tools": ["brave_search", "code_interpreter", "get_weather"]}]


def render(template, messages, options):
    options = dict(options)
    tools = options.pop("tools", None)
    try:
        text, spans = render_jinja_template([messages], tools=tools, chat_template=template,
                                            return_assistant_tokens_mask=True, bos_token="<s>", eos_token="</s>",
                                            **options)
    except Exception as error:  # the template refuses the chat
        return {"error": str(error)}
    encoded = [[len(text[0][:a].encode()), len(text[0][:b].encode())] for a, b in spans[0]]
    return {"text": text[0], "generation": encoded}


out = {"chats": CHATS, "cases": [], "constructs": []}
for path in sorted(HERE.glob("*.jinja")):
    template = path.read_text()
    for chat, messages in CHATS.items():
        for options in OPTIONS:
            out["cases"].append({"template": path.name, "chat": chat, "options": options,
                                 **render(template, messages, options)})
for source in json.loads((HERE / "constructs.json").read_text()):
    out["constructs"].append({"source": source, **render(source, CHATS["turns"], {})})
json.dump(out, sys.stdout, ensure_ascii=False, indent=0)
