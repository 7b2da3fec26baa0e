"""What a job left behind, and what plain Hugging Face code makes of it."""

import statistics
from pathlib import Path

import attrs
import xxhash


@attrs.frozen
class Sample:
    """One trajectory, as the trainer read it."""

    prompt: list
    response: list
    mask: list
    logprobs: list
    score: float
    fields: dict
    tag: dict

    @property
    def steps(self):
        """The step that made each token of the whole sequence, where one did."""
        found = {}
        for turn in self.fields["rose_turns"]:
            for start, end, step in turn["version_spans"]:
                found.update(dict.fromkeys(range(start, end), step))
        return found

    @property
    def engines(self):
        return [hop[0] for turn in self.fields["rose_turns"] for hop in turn["hops"]]


def samples(witness, partition="train"):
    import torch

    found = []
    for path in sorted(Path(witness).glob("samples-*.pt")):
        data = torch.load(path, weights_only=False)
        if data["partition"] == partition:
            found += [_sample(row, tag) for row, tag in zip(data["rows"], data["tags"], strict=True)]
    return found


def _sample(row, tag):
    fields = row["extra_fields"]
    return Sample(
        prompt=row["prompts"].tolist(),
        response=row["responses"].tolist(),
        mask=row["response_mask"].tolist(),
        logprobs=row["rollout_log_probs"].tolist(),
        score=float(row["rm_scores"].sum()),
        fields=dict(fields),
        tag=dict(tag),
    )


class Policies:
    """The trainer's weights after each step, in a plain model: rounded to the type in which engines hold them, computed in float32."""

    def __init__(self, policy, witness, dtype="float32"):
        from transformers import AutoModelForCausalLM

        self._witness = Path(witness)
        self._model = AutoModelForCausalLM.from_pretrained(policy, attn_implementation="eager").float().eval()
        self._now, self._dtype = None, dtype

    def steps(self):
        return sorted(int(path.stem.split("-")[1]) for path in self._witness.glob("weights-*.safetensors"))

    def tensors(self, step):
        from safetensors.torch import load_file

        return load_file(str(self._witness / f"weights-{step}.safetensors"))

    def sums(self, step, dtype=None):
        """Digest of each tensor's bytes."""
        import torch

        found = {}
        for name, tensor in self.tensors(step).items():
            cast = tensor if dtype is None else tensor.to(dtype)
            found[name] = xxhash.xxh3_128_hexdigest(cast.contiguous().view(torch.uint8).numpy().tobytes())
        return found

    def at(self, step):
        if self._now != step:
            import torch

            dtype = getattr(torch, self._dtype)
            held = {name: tensor.to(dtype).float() for name, tensor in self.tensors(step).items()}
            self._model.load_state_dict(held, strict=False)
            self._now = step
        return self._model

    def logprobs(self, step, ids, positions):
        import torch

        with torch.no_grad():
            scores = torch.log_softmax(self.at(step)(torch.tensor([ids])).logits[0].float(), -1)
        return [float(scores[position - 1, ids[position]]) for position in positions]

    def greedy(self, step, prompt, num_tokens, end):
        import torch

        with torch.no_grad():
            found = self.at(step).generate(
                torch.tensor([prompt]), max_new_tokens=num_tokens, do_sample=False, eos_token_id=end, pad_token_id=0
            )
        return found[0, len(prompt) :].tolist()


def check_fields(sample, response_length):
    """Lengths, masks, log-probs and steps of one trajectory."""
    assert 0 < len(sample.response) <= response_length
    assert len(sample.mask) == len(sample.logprobs) == len(sample.response)
    steps, start = sample.steps, len(sample.prompt)
    for n, (drawn, logprob) in enumerate(zip(sample.mask, sample.logprobs, strict=True)):
        assert bool(drawn) == (start + n in steps), "every drawn token has a step, and no other token"
        assert logprob <= 0.0 if drawn else logprob == 0.0
    assert sample.tag["min_global_steps"] == min(steps.values())
    assert sample.tag["max_global_steps"] == max(steps.values())


def logprob_errors(sample, policies):
    """How far each drawn token's log-prob is from that of the weights that are said to have drawn it."""
    ids, start = sample.prompt + sample.response, len(sample.prompt)
    errors, steps = [], sample.steps
    for step in set(steps.values()):
        positions = [one for one, made in steps.items() if made == step and one < len(ids)]
        for position, exact in zip(positions, policies.logprobs(step, ids, positions), strict=True):
            errors.append(abs(sample.logprobs[position - start] - exact))
    return errors


def check_logprobs(all_samples, policies, *, mean, p99):
    """Hold the errors' mean and 99th percentile against limits, and return both."""
    errors = sorted(error for sample in all_samples for error in logprob_errors(sample, policies))
    found = statistics.mean(errors), errors[int(0.99 * (len(errors) - 1))]
    assert found[0] < mean, found
    assert found[1] < p99, found
    return found
