"""lmms-eval itself, on small files in the layout that its tasks read, with no hub in reach."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest
from published import make_clip

from edgevlm import Session
from edgevlm.apps.sources.recordings import VideoSource
from edgevlm.runtime.budget import TextBudget

pytestmark = pytest.mark.slow
if importlib.util.find_spec("lmms_eval") is None:
    pytest.skip("lmms-eval is not installed", allow_module_level=True)

CHOICES = ["A. red", "B. blue", "C. green", "D. none"]
TASKS = {  # where the task looks for videos, the data set's folder and split, and records
    "videomme": ("videomme/data", "lmms-eval/Video-MME/videomme", "test", [
        {"videoID": video, "question": f"Which color {video} {number}?", "options": CHOICES, "answer": "B", "duration": "short",
         "domain": "Knowledge", "sub_category": "Astronomy", "task_type": "OCR Problems", "question_id": f"{video}-{number}"}
        for number in range(2) for video in ("one", "two")
    ]),
    "mlvu_dev": ("mlvu", "sy1998/MLVU_dev", "test", [
        {"video_name": "one.mp4", "question": "Which color?", "task_type": "plotQA", "answer": "B"},
    ]),
    "egoschema_subset": ("egoschema/videos", "lmms-eval/egoschema/Subset", "test", [
        {"video_idx": "one", "question": "Which color?", "option": [*CHOICES, "E. all"], "answer": "1", "question_idx": "0"},
    ]),
    "mvbench_action_antonym": ("mvbench_video/ssv2_video_mp4", "OpenGVLab/MVBench/action_antonym", "train", [
        {"video": "one.mp4", "question": "Which color?", "candidates": ["red", "blue", "green"], "answer": "blue"},
    ]),
    "longvideobench_val_v": ("datasets/longvideobench/videos", "longvideobench/LongVideoBench", "validation", [
        {"video_path": "one.mp4", "question": "Which color?", "option0": "red", "option1": "blue", "option2": "green",
         "option3": "none", "option4": "N/A", "correct_choice": 1, "duration": 3.0, "duration_group": 15, "id": "one_0",
         "question_category": "S2E"},
    ]),
}  # fmt: skip


@pytest.mark.parametrize("task", TASKS)
def test_a_task_is_answered_from_local_files_as_a_session_answers(task, tmp_path):
    parquet, pyarrow = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
    videos, folder, split, records = TASKS[task]
    for seed, name in enumerate(("one", "two")):
        make_clip(tmp_path / "home" / videos / f"{name}.mp4", 3, seed)
    (tmp_path / folder).mkdir(parents=True)
    parquet.write_table(pyarrow.Table.from_pylist(records), tmp_path / folder / f"{split}-00000-of-00001.parquet")
    if folder.count("/") > 1:
        top, name = (tmp_path / folder).parent, folder.rpartition("/")[2]
        named = f"- config_name: {name}\n  data_files:\n  - split: {split}\n    path: {name}/{split}-*\n"
        (top / "README.md").write_text(f"---\nconfigs:\n{named}---\n")
    settings = "model=demo,policy=last-seen,budget=256,fps=2"
    command = ["--model", "edgevlm", "--model_args", settings, "--tasks", task, "--batch_size", "1", "--log_samples"]
    done = subprocess.run(
        [sys.executable, "-m", "lmms_eval", *command, "--output_path", "out"],
        cwd=tmp_path, env={**os.environ, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"},
        capture_output=True, text=True,
    )  # fmt: skip
    written = list((tmp_path / "out").rglob(f"*samples_{task}.jsonl"))  # lmms-eval ends with 0 after an error too
    assert written, done.stderr[-2000:]
    samples = [json.loads(line) for line in written[0].read_text().splitlines()]
    assert len(samples) == len(records)

    for sample, record in zip(sorted(samples, key=lambda each: each["doc_id"]), records, strict=True):
        name = record.get("videoID", "one")
        budget = TextBudget(conversation=0, question=1024, answer=1024)
        with Session.open("demo", policy="last-seen", budget=256, text_budget=budget) as session:
            for frame in VideoSource(tmp_path / "home" / videos / f"{name}.mp4", 2):
                session.watch(frame.image, frame.time_s)
            answer = session.ask(sample["input"], max_tokens=32 if task.startswith("long") else 16)
            answer.wait()
        assert sample["filtered_resps"] == answer.text.strip()
