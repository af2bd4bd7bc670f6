"""Values of a token classifier with one label, by transformers: the llama3 fixture with a given score layer.

    python make_values.py         # needs torch and transformers; writes values.json beside this file
"""
import json
import pathlib
import shutil
import tempfile

import torch
from transformers import AutoModelForTokenClassification

HERE = pathlib.Path(__file__).parent
IDS = [[1, 2, 3, 4, 5, 6, 7], [300, 200, 100], [9]]

with tempfile.TemporaryDirectory() as folder:
    shutil.copytree(HERE.parent / "models" / "llama3", folder, dirs_exist_ok=True)
    config = json.loads((pathlib.Path(folder) / "config.json").read_text())
    config.update({"architectures": ["LlamaForTokenClassification"], "id2label": {"0": "value"}, "label2id": {"value": 0}})
    (pathlib.Path(folder) / "config.json").write_text(json.dumps(config))
    model = AutoModelForTokenClassification.from_pretrained(folder, dtype=torch.float32)
model.eval()
with torch.no_grad():
    model.score.weight.copy_(0.01 * torch.arange(64.0)[None])
    model.score.bias.fill_(0.25)
    values = [model(torch.tensor([row])).logits[0, :, 0].tolist() for row in IDS]
(HERE / "values.json").write_text(json.dumps({"ids": IDS, "values": values}) + "\n")
