"""The picture of the screen is drawn from what a run left."""

from bench.screen import picture
from model.run.journal import Journal


def test_a_picture_of_the_screen_has_its_rows(tmp_path):
    with Journal(tmp_path / "run" / "metrics.jsonl") as journal:
        journal.write("start", total_steps=100)
        journal.write("stop", step=0, reason="finished")
    picture(tmp_path / "run", tmp_path / "images" / "screen.svg")
    drawn = (tmp_path / "images" / "screen.svg").read_text(encoding="utf-8").replace("&#160;", " ")
    assert drawn.startswith("<svg") and "finished at step 0" in drawn and "0 out of memory" in drawn
