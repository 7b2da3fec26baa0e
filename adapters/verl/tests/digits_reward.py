"""A reward that a tiny model can move: the share of answers' letters that are digits."""


def compute_score(data_source, solution_str, ground_truth, extra_info=None, **_):
    return sum(letter.isdigit() for letter in solution_str) / (len(solution_str) + 1)
