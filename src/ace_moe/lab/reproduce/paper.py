"""Figures the paper printed for its three models: shown beside one's own, never used otherwise.

Budgets are 10, 20 … 60 %. Qwen3 and Qwen3.6: perplexity and mean accuracy in turn; Gemma-4: accuracy alone.
"""

from __future__ import annotations

from collections.abc import Sequence

MODELS = {"qwen3-30b-a3b-instruct-2507": "qwen3", "qwen3.6-35b-a3b": "qwen3.6", "gemma-4-26b-a4b-it": "gemma-4"}

MAIN = {
    "qwen3": """
        BF16 7.52 80.67 7.52 80.67 7.52 80.67 7.52 80.67 7.52 80.67 7.52 80.67
        Score 7.7 79.69 8.09 77.85 8.65 77.97 9.63 75.39 12.03 66.69 18.76 37.64
        NAEE 7.7 80.39 8.07 79.34 8.68 77.77 9.82 72.93 12.48 64.4 19.56 43.44
        MoDES 7.57 79.79 7.84 78.8 8.33 77.99 9.28 76.03 12.25 56.61 17.8 39.15
        DiEP 10.09 76.58 16.0 64.36 28.42 47.05 65.87 27.44 136.92 3.96 459.88 3.62
        AIMER 7.55 80.08 7.65 79.94 7.82 79.36 8.24 77.17 8.86 73.4 10.89 60.88
        Top-P 7.54 79.95 7.66 79.54 7.82 79.27 8.19 77.73 8.85 74.17 10.87 61.91
        SERE 8.77 75.59 11.0 66.65 14.27 62.55 20.81 58.05 46.36 38.62 178.96 9.82
        XShare 8.1 76.24 9.14 63.27 10.82 32.96 13.67 22.48 19.63 10.98 39.22 6.15
        ExpertSparsity 7.68 79.54 8.02 79.45 8.49 78.63 9.31 76.76 10.98 73.67 13.39 62.28
        GSP 7.56 80.14 7.67 79.94 7.87 79.59 8.22 77.86 8.99 74.1 10.99 62.53
        RCR 7.59 80.13 7.83 78.85 8.31 77.81 9.19 75.36 11.62 67.01 17.95 39.6
        ACE 7.55 80.39 7.66 80.25 7.86 79.77 8.19 78.21 8.85 74.3 10.86 63.35
    """,
    "qwen3.6": """
        BF16 7.01 81.17 7.01 81.17 7.01 81.17 7.01 81.17 7.01 81.17 7.01 81.17
        Score 7.38 81.66 7.79 80.51 8.36 78.41 9.21 74.61 10.58 67.45 13.38 54.66
        NAEE 7.37 81.27 7.8 80.99 8.4 79.01 9.3 74.84 10.89 67.5 14.17 53.42
        MoDES 7.38 80.86 7.41 80.59 7.72 78.19 8.1 75.74 9.42 71.42 10.87 69.04
        DiEP 8.83 79.18 12.09 76.91 17.62 72.73 28.45 66.16 45.43 56.42 85.12 32.27
        GSP 7.18 81.12 7.38 80.5 7.66 79.46 8.08 78.25 8.87 75.01 10.48 70.54
        RCR 7.31 80.97 7.65 81.05 8.17 78.36 8.95 75.35 10.39 66.42 13.48 45.38
        ACE 7.16 81.41 7.34 81.46 7.57 79.89 7.88 78.79 8.67 75.57 9.98 70.7
    """,
    "gemma-4": """
        BF16 81.63 81.63 81.63 81.63 81.63 81.63
        Score 80.59 80.14 78.19 76.1 71.14 64.05
        NAEE 80.67 80.73 77.97 73.84 68.28 57.36
        MoDES 80.82 80.63 78.42 77.84 38.74 26.86
        DiEP 79.61 78.66 75.9 72.14 30.83 18.13
        GSP 81.14 81.16 79.71 78.65 75.73 69.65
        RCR 80.74 79.84 78.0 77.49 68.96 60.03
        ACE 81.59 81.28 80.15 79.51 77.11 72.11
    """,
}

THRESHOLDS = {
    "qwen3": """
        WikiText-2 0.066076 0.078141 0.088436 0.098972 0.110965 0.125460
        ARC-C 0.058638 0.071791 0.082505 0.093486 0.105523 0.121092
        ARC-E 0.058372 0.071509 0.082139 0.093135 0.105159 0.120699
        PIQA 0.059348 0.073267 0.084159 0.095478 0.106510 0.121876
        MATH-500 0.064817 0.077139 0.087528 0.097363 0.108013 0.120972
        GPQA-Diamond 0.062387 0.074762 0.085411 0.095339 0.106186 0.120229
        HumanEval 0.059915 0.073406 0.084152 0.094608 0.105755 0.119866
        LiveCodeBench 0.063674 0.076165 0.086691 0.096949 0.107934 0.121980
    """,
    "qwen3.6": """
        WikiText-2 0.068089 0.080015 0.089632 0.098947 0.109093 0.121344
        ARC-C 0.058495 0.070524 0.080678 0.091051 0.102505 0.116258
        ARC-E 0.058061 0.070070 0.080227 0.090632 0.102167 0.116018
        PIQA 0.058142 0.071141 0.081325 0.091348 0.102849 0.116473
        MATH-500 0.060603 0.073996 0.084784 0.095119 0.105744 0.117395
        GPQA-Diamond 0.066227 0.078559 0.088131 0.097670 0.107836 0.119644
        HumanEval 0.060916 0.075139 0.086014 0.096280 0.106390 0.117196
        LiveCodeBench 0.062504 0.076356 0.086684 0.096633 0.106850 0.118335
    """,
    "gemma-4": """
        WikiText-2 0.051152 0.068149 0.081192 0.093195 0.105726 0.120364
        AIME-2025 0.054991 0.070915 0.083559 0.095452 0.108153 0.122674
        ARC-C 0.052549 0.069626 0.082656 0.094467 0.107235 0.121681
        ARC-E 0.051525 0.068566 0.081766 0.093692 0.106557 0.121260
        PIQA 0.054232 0.071812 0.084943 0.096504 0.108424 0.122556
        MATH-500 0.056684 0.073440 0.085783 0.097104 0.109174 0.122829
        GPQA-Diamond 0.055609 0.072302 0.084753 0.096559 0.108750 0.122434
        HumanEval 0.057597 0.073689 0.085818 0.097168 0.109297 0.122688
        LiveCodeBench 0.056699 0.073054 0.085367 0.096766 0.108862 0.122271
    """,
}

FUSED_AT = (0.3, 0.5)  # qwen3
FUSED = {
    "Min": (8.21, 77.20, 9.20, 73.12),
    "Mean": (7.95, 78.45, 8.97, 74.01),
    "Max": (7.86, 79.77, 8.85, 74.30),
}
COST = {"quantile": 1.8, "binary search": 16.5, "frontier walk": 18.9}  # minutes, qwen3 at 10 %
LATENCY = {  # qwen3 on an A100: tokens and batch → TTFT and TPOT, unskipped and at 60 %, in ms
    (256, 1): (144.7, 84.1, 34.9, 26.7),
    (512, 1): (183.7, 102.3, 57.2, 44.9),
    (1024, 1): (270.9, 120.3, 85.1, 63.0),
    (1024, 2): (290.5, 156.7, 95.3, 67.8),
    (1024, 4): (344.9, 182.6, 127.3, 91.1),
}


def rows(block: str) -> dict[str, list[float]]:
    """A block of lines: a name and its numbers."""
    lines = [line.split() for line in block.splitlines() if line.strip()]
    return {name: [float(x) for x in numbers] for name, *numbers in lines}


def known(model: str) -> str | None:
    """Which of the paper's models this is, by its name."""
    return MODELS.get(model.rpartition("/")[2].lower())


def quality(model: str, method: str, budget: float) -> tuple[float | None, float | None]:
    """Perplexity and accuracy that the paper has for a row, or nothing."""
    name = known(model)
    numbers: Sequence[float]
    if method in FUSED and budget in FUSED_AT:
        at, numbers = 2 * FUSED_AT.index(budget), FUSED[method]
        return (numbers[at], numbers[at + 1]) if name == "qwen3" else (None, None)
    numbers = rows(MAIN[name]).get(method, []) if name else []
    at = round(budget * 10) - 1 if budget else 0
    if not numbers:
        return None, None
    return (None, numbers[at]) if len(numbers) == 6 else (numbers[2 * at], numbers[2 * at + 1])


def threshold(model: str, workload: str, budget: float) -> float | None:
    """Threshold of a workload that has the paper's name, such as MATH-500.jsonl."""
    name, at = known(model), round(budget * 10) - 1
    numbers = rows(THRESHOLDS[name]).get(workload) if name else None
    return numbers[at] if numbers else None
