"""The curve of a run."""

import pytest
from PIL import Image

from megatron_credit.report.curve import draw_curve, series

RECORDS = [
    {"step": 0, "eval/accuracy": 0.5},
    {
        "step": 1,
        "reward/mean": 0.5,
        "mismatch/logprob_abs_max": 1e-6,
        "timing/step_s": 3.0,
        "timing/rollout_s": 1.0,
        "timing/train_s": 1.5,
        "timing/sync_s": 0.5,
    },
    {"step": 2, "eval/accuracy": 0.75},
]


def test_series_skips_records_without_the_metric():
    assert series(RECORDS, "eval/accuracy") == ([0, 2], [0.5, 0.75])


def test_the_picture_has_the_curve_on_it(tmp_path):
    draw_curve(RECORDS, tmp_path / "curve.png", title="run")
    picture = Image.open(tmp_path / "curve.png").convert("RGB")
    assert picture.width > 500
    accuracy_blue = (31, 119, 180)
    assert sum(pixel == accuracy_blue for pixel in picture.getdata()) > 100


def test_no_records_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="recorded no step"):
        draw_curve([], tmp_path / "curve.png", title="run")
