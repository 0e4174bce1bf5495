"""docs/memory.md."""

from __future__ import annotations

from collections.abc import Iterable

from blocks.text import GIB, MIB, load, named, prose, small, table


def ratios() -> str:
    head = "network | run | BatchNorm | MimicNorm | no norm | MimicNorm / BatchNorm | MimicNorm / no norm"
    lines = []
    for r in load("memory-ratios")["rows"]:
        saved = [f"{r['saved_mib_per_image'][m]:.2f}" for m in ("batchnorm", "mimicnorm", "nonorm")]
        quotients = [f"**{r['mimicnorm_over_batchnorm']:.3f}**", f"{r['mimicnorm_over_nonorm']:.4f}"]
        lines.append([named(r["network"]), named(r["setting"]), *saved, *quotients])
    return table(head, lines, left=2)


def peak() -> str:
    data = load("memory-peak")
    text = prose(
        f"ResNet-50 at 224 px with SGD and momentum, batch 256, and the largest batch that fits 16 GiB "
        f"({data['largest_batch_ratio']:.2f} times BatchNorm's). One prediction took "
        f"{data['cpu_seconds_of_one_prediction']:.1f} s of CPU time, and the process used "
        f"{data['resident_mib_of_the_process_after_it']:.0f} MiB."
    )
    head = "method | saved MiB per image | peak GiB at batch 256 | peak / BatchNorm | largest batch in 16 GiB"
    lines = [
        [
            named(name),
            f"{m['saved_bytes'] / m['batch'] / MIB:.2f}",
            f"{m['peak_bytes'] / GIB:.2f}",
            f"{m['peak_ratio']:.3f}",
            m["largest_batch"],
        ]
        for name, m in data["methods"].items()
    ]
    return f"{text}\n\n{table(head, lines)}"


def prediction() -> str:
    rows = load("memory-prediction")["rows"]

    def worst(of: Iterable[dict]) -> float:
        return max((r["error"] for r in of), key=abs)

    text = prose(
        f"The prediction is within 2 % in {sum(abs(r['error']) <= 0.02 for r in rows)} of {len(rows)} steps; "
        f"the largest error is {abs(worst(rows)):.3%}."
    )
    lines = []
    for name in dict.fromkeys(r["network"] for r in rows):
        own = [r for r in rows if r["network"] == name]
        measured = [r["profiled_bytes"] / MIB for r in own]
        lines.append([named(name), f"{min(measured):.0f} to {max(measured):.0f}", small(abs(worst(own)))])
    return f"{text}\n\n{table('network | measured peak, MiB (batch 8 to 32) | worst relative error', lines)}"


def inductor() -> str:
    of = {(r["method"], r["layout"]): r for r in load("memory-inductor")["rows"]}
    plain, last = (of["batchnorm", layout] for layout in ("contiguous_format", "channels_last"))
    real, predicted = "really_saved_bytes", "predicted_saved_bytes"
    return prose(
        f"A real compiled ResNet of ten layers at batch 4, 64 px saves {last[real] / MIB:.2f} MiB where "
        f"{last[predicted] / MIB:.2f} were predicted in `channels_last`, and {plain[real] / MIB:.2f} instead of "
        f"{plain[predicted] / MIB:.2f} without it."
    )


def alternatives() -> str:
    head = "network | saved MiB per image | peak GiB, batch 256 | peak MiB, batch 4 | profiled | time / BatchNorm"
    forms = {
        "saved_mib_per_image": ".2f",
        "predicted_peak_gib_at_batch_256": ".2f",
        "predicted_peak_mib": ".0f",
        "profiled_peak_mib": ".0f",
        "median_seconds_over_batchnorm": ".2f",
    }
    rows = load("memory-alternatives")["rows"].items()
    return table(head, [[name, *(format(r[key], form) for key, form in forms.items())] for name, r in rows])


def checkpointing() -> str:
    rows = load("memory-alternatives")["rows"]
    checkpointed, converted = rows["BatchNorm, checkpointed blocks"], rows["MimicNorm"]
    saved, peaks, times = (
        [r[key] for r in (checkpointed, converted)]
        for key in ("saved_mib_per_image", "predicted_peak_gib_at_batch_256", "median_seconds_over_batchnorm")
    )
    return prose(
        f"Checkpointing the blocks of the BatchNorm ResNet-50 saves *less* for backward than conversion does, "
        f"{saved[0]:.1f} against {saved[1]:.1f} MiB per image, and its peak at batch 256 is lower, {peaks[0]:.2f} "
        f"against {peaks[1]:.2f} GiB. It costs time: a step takes {times[0]:.2f} of BatchNorm's time, a step of the "
        f"converted network {times[1]:.2f}."
    )
