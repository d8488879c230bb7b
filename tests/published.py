"""Small data folders in the published schemas, with clips made here."""

import json
from pathlib import Path

import cv2
import numpy as np

RATE = 5  # pictures a second of a made clip


def write(path: Path, value) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(value if isinstance(value, str) else json.dumps(value))
    return path


def make_clip(path: Path, seconds: float, seed: int = 0) -> Path:
    """A video of ``seconds``; picture n is a field of grey level 8 n, so that a picture says when it was."""
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter.fourcc(*"mp4v"), RATE, (64, 64))
    assert writer.isOpened()
    noise = np.random.default_rng(seed).integers(0, 8, (64, 64, 3))
    for number in range(round(seconds * RATE)):
        writer.write((8 * (number % 30) + noise).astype(np.uint8))
    writer.release()
    return path


def streamingbench(root: Path) -> None:
    """Two real-time questions on one video, one of them after its end; two in sequence; one proactive."""
    make_clip(root / "videos/sample_1.mp4", 6)
    make_clip(root / "videos/sample_2_sqa.mp4", 5)

    def asked(time, **more):
        options = ["A. red", "B. blue", "C. no", "D. two"]
        fields = {"task_type": "Object Perception", "question": "What is it?", "options": options}
        return {**fields, "time_stamp": time, "answer": "A", "required_ability": "working memory", **more}

    def record(video, questions):
        about = {"time": "[0:00:00 - 0:01:00]", "video_categories": "x", "video_path": f"./videos/{video}"}
        return {**about, "questions": questions}

    real = [asked("00:00:03"), asked("00:00:09", task_type="Counting", answer="B", options=["one", "two", "three", "four"])]
    write(root / "questions_real.json", [record("sample_1.mp4", real)])
    write(root / "questions_real_stream.json", [record("sample_1.mp4", real)])
    sequence = [asked(f"00:00:0{second}", task_type="Sequential Question Answering") for second in (2, 4)]
    write(root / "questions_sqa.json", [[record("sample_2_sqa.mp4", sequence)]])
    proactive = {
        "task_type": "Proactive Output", "question": 'When a square comes, output "square".', "time_stamp": "00:00:01",
        "ground_truth_time_stamp": "00:00:03", "ground_truth_output": "square",
    }  # fmt: skip
    write(root / "questions_proactive.json", [record("sample_1.mp4", [proactive])])


def ovobench_choice(**more) -> dict:
    return {
        "id": 0, "task": "EPM", "video": "YouTube/one.mp4", "realtime": 3.5, "question": "Which?",
        "options": ["red", "blue", "no"], "gt": 1, "answer": "blue", **more,
    }  # fmt: skip


def ovobench(root: Path) -> None:
    make_clip(root / "src_videos/YouTube/one.mp4", 6)
    write(
        root / "ovo_bench_new.json",
        [
            ovobench_choice(),
            ovobench_choice(id=1, task="OCR"),
            {
                "id": 2, "task": "CRR", "video": "YouTube/one.mp4", "question": "Why?", "answer": "so", "ask_time": 1,
                "clue_time": 4, "test_info": [{"realtime": 2, "type": 0}, {"realtime": 5, "type": 1}],
            },
            {
                "id": 3, "task": "SSR", "video": "YouTube/one.mp4", "tutorial": "cake", "all_steps": ["mix", "bake"],
                "start_time": [0, 3], "end_time": [3, 6],
                "test_info": [{"realtime": 1, "step": "mix", "type": 1}, {"realtime": 2, "step": "bake", "type": 0}],
            },
            {
                "id": 4, "task": "REC", "video": "YouTube/one.mp4", "activity": "jump", "start_times": [1, 3],
                "end_times": [2, 4], "test_info": [{"realtime": 2.5, "count": 1}, {"realtime": 4.5, "count": 2}],
            },
        ],
    )  # fmt: skip


MAKERS = {"streamingbench": streamingbench, "ovobench": ovobench}
