"""Runs whose newest checkpoint is damaged, or whose disk is filled, made read-only or deleted."""

import shutil
import subprocess

from model.run.checkpoint import checkpoint_paths, load_newest
from tests.tiny import journal, train, weights_hash
from tests.trials import Disturbed, calm_hash, delete, fill, flip, mount, truncate

FILES = ("model.safetensors", "optimizer.safetensors", "state.json", "manifest.json", "LATEST")
OPTIONS = dict(epochs=3, save_steps=1)
DISK = "4m"


def damage_trials(home, files=FILES, harms=(flip, truncate, delete)):
    """Yield one record for each damage (`harms`) to each of `files` of the newest checkpoint."""
    calm = calm_hash(home, 1, **OPTIONS)
    killed = train(home, 1, "forward:0:9:kill", output_dir="killed", dropout=0.1, **OPTIONS)
    assert killed.codes == [-9], killed.text
    for name in files:
        for harm in harms:
            run = Disturbed(home, f"{harm.__name__}_{name}", 1, **OPTIONS)
            shutil.copytree(home / "killed", run.dir)
            newest, older = checkpoint_paths(run.dir)[:2]
            harm(run.dir / "checkpoints" / name if name == "LATEST" else newest / name)
            problem = run.ends_calmly(calm)
            resumed, said = journal(run.dir, "resume")[-1]["step"], (home / "rank0.txt").read_text()
            expected = newest if name == "LATEST" else older  # a run does not need LATEST to find the newest
            if not problem and resumed != int(expected.name.removeprefix("step_")):
                problem = f"resumed from step {resumed}, not from {expected.name}"
            if not problem and ("is damaged" in said) != (expected is older):
                problem = "did not report the damage"
            said = f"resumed from step {resumed}"
            yield dict(trial=f"{name}: {harm.__name__}", said=said, wrong=problem)


def disk_trials(home, epochs=20):
    """Yield one record for each disk fault; `epochs` must be long enough for the run to notice it."""
    options = OPTIONS | dict(epochs=epochs)
    calm = calm_hash(home, 1, **options)
    for trial, harm, mounts in (
        ("a full disk, for a while", fill, True),
        ("a read-only checkpoint directory, for a while", make_read_only, True),
        ("the run directory deleted", remove, False),
    ):
        (home / "disk").mkdir(exist_ok=True)
        if mounts and mount("-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", home / "disk"):
            yield dict(trial=trial, said="not tried: mounting is not allowed here", wrong="")
            continue
        try:
            yield dict(trial=trial) | disk_trial(Disturbed(home, f"disk/{trial.split()[1]}", 1, **options), harm, calm)
        finally:
            if mounts:
                subprocess.run(["umount", "-R", home / "disk"], check=False, capture_output=True)


def disk_trial(run, harm, calm):
    """Do `harm` to the disk of a run until the run has noticed; returns dict(said, wrong)."""
    processes = run.start()
    run.wait_for("checkpoints", lambda: len(checkpoint_paths(run.dir)) == 2 and run.lines() > 10, processes)
    heal = harm(run.dir)
    failure = "no checkpoint of step"
    noticed = {
        fill: lambda: (run.home / "rank0.txt").read_text().count(failure) >= 3,
        remove: lambda: checkpoint_paths(run.dir),
    }
    noticed[make_read_only] = noticed[fill]
    run.wait_for("sign that it noticed", noticed[harm], processes)
    whole = load_newest(run.dir, lambda text: None) is not None or harm is remove
    alive = processes[0].exitcode is None
    heal()
    processes[0].join(300)
    done = (run.home / "rank0.txt").read_text()
    wrong = [] if alive and processes[0].exitcode == 0 else [f"exit code {processes[0].exitcode}: {done[-2000:]}"]
    wrong += [] if whole else ["no intact checkpoint was left"]
    failed = [line for line in journal(run.dir, "save") if "error" in line]
    wrong += [] if failed or harm is remove else ["no save failed: nothing was tested"]
    steps = [line["step"] for line in journal(run.dir, "train")]
    wrong += [] if harm is remove or steps == list(range(1, len(steps) + 1)) else ["train lines are missing"]
    if harm is remove:  # the example ids of earlier steps were deleted too
        wrong += [] if weights_hash(run.dir) == calm else ["sha256"]
    elif not wrong and (problem := run.ends_calmly(calm)):
        wrong.append(problem)
    return dict(said=f"{len(failed)} saves failed, the last: {failed[-1]['error'][:90] if failed else '–'}",
                wrong="; ".join(wrong))  # fmt: skip


def make_read_only(directory):
    folder = directory / "checkpoints"
    for _ in range(100):  # fails while a save has files open
        subprocess.run(["mount", "--bind", folder, folder], check=True)
        if not mount("-o", "remount,bind,ro", folder):
            break
        unmount(folder)
    return lambda: unmount(folder)


def unmount(folder):
    subprocess.run(["umount", "--lazy", folder], check=True)  # --lazy works while a save has files open


def remove(directory):
    while directory.exists():
        shutil.rmtree(directory, ignore_errors=True)
    return lambda: None
