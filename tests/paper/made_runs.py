"""Runs as ``training.cache`` gives them, made by hand."""


def run(model, method, top1, status="done", lr=0.1, **fields):
    recipe = {"model": model, "method": method, "lr": lr, "validation": 0.0, "data": "cifar100", "epochs": 3}
    history = [{"top1": value, "calibration_error": 0.05} for value in top1]
    return {"recipe": {**recipe, **fields}, "status": status, "step": 7, "history": history}
