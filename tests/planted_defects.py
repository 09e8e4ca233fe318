"""Defects for tests/planted.py: each is a realistic mistake in one line, and the tests that guard against it.

Add one where a bug was found that no test would have told, beside the test that now does.
"""

from typing import NamedTuple


class Defect(NamedTuple):
    """A mistake.

    Attributes:
        name: what breaks.
        file: where.
        old: text of the file, which occurs in it exactly once.
        new: what stands in its place.
        tests: files whose tests guard against it, the quickest that do.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


def planted(text: str, defect: Defect) -> str:
    """The file's ``text`` with the defect; :class:`LookupError` where its old text does not occur exactly once."""
    count = text.count(defect.old)
    if count != 1:
        raise LookupError(
            f"{defect.file} has {count} times {defect.old!r}: the code has moved on; plant {defect.name!r} elsewhere"
        )
    return text.replace(defect.old, defect.new)


_HEAD = (
    Defect(
        "each shard normalises by its own classes alone",
        "plsc/head/sharded_softmax.py",
        "total = all_reduce_sum(partial.total * (local - maximum).exp(), self.mesh.head) + (logit - maximum).exp()",
        "total = partial.total * (local - maximum).exp() + (logit - maximum).exp()",
        ("tests/head/test_exactness.py",),
    ),
    Defect(
        "data parallelism divides the embeddings' gradient by the number of ranks",
        "plsc/head/sharded_softmax.py",
        "(gradient * (grad * softmax.mesh.world_size))",
        "(gradient * grad)",
        ("tests/head/test_groups.py",),
    ),
    Defect(
        "a head group takes its own samples for the whole batch",
        "plsc/head/sharded_softmax.py",
        "scale = self.margin.s / gathered.total\n",
        "scale = self.margin.s / len(position)\n",
        ("tests/head/test_groups.py",),
    ),
    Defect(
        "classes that a micro-batch did not sample learn from it",
        "plsc/head/sharded_softmax.py",
        "return union, torch.cat(columns, dim=1)",
        "return union, None",
        ("tests/head/test_state.py",),
    ),
    Defect(
        "the label behind the last class is taken",
        "plsc/head/global_batch.py",
        "if low < 0 or high >= num_classes:",
        "if low < 0 or high > num_classes:",
        ("tests/head/test_state.py",),
    ),
    Defect(
        "every step samples the same negatives",
        "plsc/head/sampling.py",
        "keyed_generator(self.device, self.seed, self.first + 1, batch)",
        "keyed_generator(self.device, self.seed, self.first + 1, 0)",
        ("tests/head/test_sampling.py",),
    ),
    Defect(
        "all shards sample the same negatives",
        "plsc/head/sampling.py",
        "keyed_generator(self.device, self.seed, self.first + 1, batch)",
        "keyed_generator(self.device, self.seed, 1, batch)",
        ("tests/head/test_sampling.py",),
    ),
    Defect(
        "a loss that another step has overtaken updates a table in a file",
        "plsc/head/host_table.py",
        "return super().version + self.staging.updates",
        "return super().version",
        ("tests/head/test_placement.py",),
    ),
    Defect(
        "a skipped step leaves the norms of the rows that it did not take",
        "plsc/head/backends/torch_backend.py",
        "tables = [rows.table.weight, rows.table.inverse_norm]",
        "tables = [rows.table.weight]",
        ("tests/optim/test_verdict.py",),
    ),
    Defect(
        "the running maximum of large logits shrinks sums the wrong way",
        "plsc/head/backends/torch_backend.py",
        "shrink = (maximum - higher).exp_()",
        "shrink = (higher - maximum).exp_()",
        ("tests/head/test_groups.py",),
    ),
    Defect(
        "bfloat16 weights and their momentum are rounded by the same random bits",
        "plsc/head/low_precision.py",
        "return (self.bits >> 16) & 0xFFFF",
        "return self.bits & 0xFFFF",
        ("tests/head/test_low_precision.py", "tests/native/test_head_kernels.py"),
    ),
    Defect(
        "Triton's second pass masks every chunk by the first one's sample",
        "plsc/head/backends/triton_pass_kernels.py",
        "at = member + (start + begin) * batch + sample",
        "at = member + begin * batch + sample",
        ("tests/head/test_triton_passes.py",),
    ),
    Defect(
        "Triton's AdamW divides by the root before it corrects the bias",
        "plsc/head/backends/triton_update_kernels.py",
        "root = tl.sqrt(second / correction2) + eps",
        "root = tl.sqrt(second) / correction2 + eps",
        ("tests/head/test_triton_adamw.py",),
    ),
    Defect(
        "the CPU's first pass counts rows that fill up a block as classes",
        "plsc/native/head_kernels.cpp",
        "for (int64_t c = 0; c < here; c++) {\n                float* row",
        "for (int64_t c = 0; c < kBlock; c++) {\n                float* row",
        ("tests/native/test_head_kernels.py",),
    ),
    Defect(
        "the CPU's update looks ahead by the momentum of the step before",
        "plsc/native/head_kernels.cpp",
        "step[d] = sgd.nesterov ? step[d] + sgd.momentum * m[d] : m[d];",
        "step[d] = sgd.nesterov ? m[d] + sgd.momentum * step[d] : m[d];",
        ("tests/native/test_head_kernels.py",),
    ),
)

_LOSSES_AND_OPTIMIZERS = (
    Defect(
        "ElasticFace+ gives the largest margins to the easiest samples",
        "plsc/losses/margins.py",
        "drawn.sort(descending=True).values",
        "drawn.sort(descending=False).values",
        ("tests/head/test_groups.py", "tests/head/test_exactness.py"),
    ),
    Defect(
        "CurricularFace's hard negatives have half the slope",
        "plsc/losses/margins.py",
        "torch.where(hard, t + 2 * cos, 1.0)",
        "torch.where(hard, t + cos, 1.0)",
        ("tests/head/test_groups.py", "tests/head/test_exactness.py"),
    ),
    Defect(
        "AdaFace's deviation is biased",
        "plsc/losses/margins.py",
        "std = norm.std() if norm.numel() > 1",
        "std = norm.std(correction=0) if norm.numel() > 1",
        ("tests/head/test_groups.py", "tests/head/test_exactness.py"),
    ),
    Defect(
        "the first step of the warm-up has a learning rate of zero",
        "plsc/optim/schedules.py",
        "return min((step + 1) / steps, 1.0)",
        "return min(step / steps, 1.0)",
        ("tests/optim/test_schedules.py",),
    ),
    Defect(
        "layer-wise decay gives every block the rate of the next",
        "plsc/optim/parameter_groups.py",
        "decay ** (len(blocks) - k) for k",
        "decay ** (len(blocks) - k - 1) for k",
        ("tests/optim/test_parameter_groups.py",),
    ),
    Defect(
        "an overflow on one rank skips that rank's step alone",
        "plsc/optim/gradients.py",
        "agreed = all_reduce_max(self._not_finite(backbone, head), self.mesh)",
        "agreed = self._not_finite(backbone, head)",
        ("tests/head/test_state.py",),
    ),
    Defect(
        "clipping counts weights as often as ranks hold them",
        "plsc/optim/gradients.py",
        "square += total_norm(same).to(square).square() / count",
        "square += total_norm(same).to(square).square()",
        ("tests/parallel/strategies/test_tensor_parallel.py", "tests/train/test_tensor_parallel_train.py"),
    ),
    Defect(
        "a skipped update counts for bias correction and random bits",
        "plsc/optim/verdict.py",
        "self._settled += not self._last.skipped",
        "self._settled += 1",
        ("tests/optim/test_verdict.py",),
    ),
    Defect(
        "LAMB clips gradients as timm does by default",
        "plsc/optim/backbone_optimizers.py",
        "max_grad_norm=None,",
        "max_grad_norm=1.0,",
        ("tests/optim/test_backbone_optimizers.py",),
    ),
    Defect(
        "moments in 8 bits never step weights that are channels last",
        "plsc/optim/eight_bit_adamw.py",
        "if not weight.is_contiguous():  # channels_last",
        "if weight.is_contiguous():  # channels_last",
        ("tests/optim/test_eight_bit_adamw.py",),
    ),
    Defect(
        "a loss scale that is not finite updates the table",
        "plsc/optim/head_optimizers.py",
        "torch.stack([p.log_z.sum(), p.target_grad.sum(), _grad_loss(p)])",
        "torch.stack([p.log_z.sum(), p.target_grad.sum()])",
        ("tests/head/test_state.py",),
    ),
)

_PARALLEL = (
    Defect(
        "the maximum over ranks is their sum",
        "plsc/parallel/collectives.py",
        "dist.all_reduce(tensor, dist.ReduceOp.MAX, group=mesh.group)",
        "dist.all_reduce(tensor, dist.ReduceOp.SUM, group=mesh.group)",
        ("tests/parallel/test_collectives.py", "tests/head/test_state.py"),
    ),
    Defect(
        "ranks keep the wrong rows of a sum where sizes differ",
        "plsc/parallel/collectives.py",
        "return torch.split(all_reduce_sum(tensor, mesh), sizes)[mesh.rank]",
        "return all_reduce_sum(tensor, mesh).chunk(mesh.world_size)[mesh.rank]",
        ("tests/parallel/test_collectives.py",),
    ),
    Defect(
        "running variances of synchronised batch normalisation are biased",
        "plsc/parallel/sync_batchnorm.py",
        "unbiased = variance * (count / (count - 1).clamp(min=1))",
        "unbiased = variance",
        ("tests/parallel/test_sync_batchnorm.py",),
    ),
    Defect(
        "the backward pass of synchronised batch normalisation is each rank's own",
        "plsc/parallel/sync_batchnorm.py",
        "totals = (all_reduce_sum(local, layer.mesh) / count).to(hat.dtype)",
        "totals = (local / count).to(hat.dtype)",
        ("tests/parallel/test_sync_batchnorm.py",),
    ),
    Defect(
        "weights are averaged a step late",
        "plsc/parallel/model_averaging.py",
        "self._averager.step = self._step + 1",
        "self._averager.step = self._step",
        ("tests/parallel/test_model_averaging.py",),
    ),
    Defect(
        "gradients that were sent stay in the momentum",
        "plsc/parallel/gradient_compression.py",
        "momentum[largest] = 0.0",
        "momentum[largest] *= 1.0",
        ("tests/parallel/test_gradient_compression.py",),
    ),
    Defect(
        "micro-batches of a pipeline end with a single image",
        "plsc/parallel/strategies/pipeline.py",
        "rows = [*own[:-1], max(own[-1], 2)]",
        "rows = [*own[:-1], max(own[-1], 1)]",
        ("tests/parallel/strategies/test_pipeline.py",),
    ),
    Defect(
        "checkpoints of tensor parallelism store q, k and v in the order of the ranks",
        "plsc/parallel/strategies/tensor_parallel.py",
        "runs.append((length, (part * tp + rank) * height + row))",
        "runs.append((length, (rank * 3 + part) * height + row))",
        ("tests/parallel/strategies/test_tensor_parallel.py", "tests/train/test_tensor_parallel_train.py"),
    ),
    Defect(
        "checkpoints of zero1 hold the optimizer's state of one rank alone",
        "plsc/parallel/strategies/zero.py",
        'return name.startswith("optimizer.") or super().writes(name, tensor)',
        "return super().writes(name, tensor)",
        ("tests/train/test_strategies.py",),
    ),
    Defect(
        "gradients are exchanged after each micro-batch of fsdp but the last",
        "plsc/parallel/strategies/fsdp.py",
        "set_requires_gradient_sync(last)",
        "set_requires_gradient_sync(not last)",
        ("tests/train/test_strategies.py",),
    ),
    Defect(
        "exact gradients are divided by the number of ranks twice",
        "plsc/parallel/strategies/ddp.py",
        "lambda gradient: gradient / self.mesh.world_size",
        "lambda gradient: gradient / self.mesh.world_size**2",
        ("tests/parallel/test_float64_gradients.py",),
    ),
)

_TRAIN = (
    Defect(
        "a short micro-batch counts as much as a whole one",
        "plsc/train/step.py",
        "share = sum(sizes) / samples",
        "share = 1 / max(round(samples / sum(sizes)), 1)",
        ("tests/train/test_trainer.py",),
    ),
    Defect(
        "a skipped step leaves its running statistics",
        "plsc/train/step.py",
        "self.statistics.restore_where(verdict.flag)",
        "self.statistics.remember()",
        ("tests/train/test_deferred_results.py", "tests/train/test_trainer.py"),
    ),
    Defect(
        "every step drops the same units",
        "plsc/train/step.py",
        "torch.manual_seed(hash((self.components.config.seed, number, rank)))",
        "torch.manual_seed(hash((self.components.config.seed, rank)))",
        ("tests/train/test_trainer.py",),
    ),
    Defect(
        "all ranks drop the same units",
        "plsc/train/step.py",
        "torch.manual_seed(hash((self.components.config.seed, number, rank)))",
        "torch.manual_seed(hash((self.components.config.seed, number)))",
        ("tests/train/test_trainer.py",),
    ),
    Defect(
        "the host waits for the loss of every micro-batch",
        "plsc/train/step.py",
        "total += loss.detach().double() * share",
        "total += loss.item() * share",
        ("tests/gpu_trace/test_training_step.py",),
    ),
    Defect(
        "the moving average warms up along another curve",
        "plsc/train/components.py",
        "1 - min(self.decay, number / (9 + number))",
        "1 - min(self.decay, number / (10 + number))",
        ("tests/train/test_trainer.py",),
    ),
    Defect(
        "a skipped step moves the moving average",
        "plsc/train/components.py",
        "weight = torch.where(verdict.flag != 0, 0.0, 1 - min(",
        "weight = torch.where(verdict.flag < 0, 0.0, 1 - min(",
        ("tests/train/test_deferred_results.py", "tests/train/test_trainer.py"),
    ),
    Defect(
        "tensors of a checkpoint are not synced to disk",
        "plsc/train/checkpoint_writer.py",
        "sync_files=True",
        "sync_files=False",
        ("tests/train/test_async_checkpoint.py",),
    ),
    Defect(
        "a checkpoint holds weights of the steps after it",
        "plsc/train/checkpoint_writer.py",
        'return tensor.to("cpu", copy=True), None',
        'return tensor.to("cpu"), None',
        ("tests/train/test_async_checkpoint.py",),
    ),
    Defect(
        "the worst checkpoints are kept",
        "plsc/train/checkpoint.py",
        "key=lambda each: each.accuracy or 0.0, reverse=True)",
        "key=lambda each: each.accuracy or 0.0)",
        ("tests/train/test_checkpoint.py",),
    ),
    Defect(
        "a resumed run begins its epoch anew",
        "plsc/train/state.py",
        'components.loader.load_state_dict(state["loader"])',
        'components.loader.load_state_dict({**state["loader"], "consumed": 0})',
        ("tests/train/test_resume.py",),
    ),
    Defect(
        "a run that goes on with another batch size jumps in its schedule",
        "plsc/train/state.py",
        "round(step * now / then)",
        "round(step * then / now)",
        ("tests/train/test_resume.py",),
    ),
    Defect(
        "all ranks hash the same share of a checkpoint's files",
        "plsc/train/checkpoint_reader.py",
        "wanted[self.mesh.rank :: self.mesh.world_size]",
        "wanted[:: self.mesh.world_size]",
        ("tests/train/test_resume.py",),
    ),
    Defect(
        "a later evaluation that is no better replaces the best weights",
        "plsc/train/evaluate.py",
        'accuracy > self._position.best.get("accuracy", -1.0)',
        'accuracy >= self._position.best.get("accuracy", -1.0)',
        ("tests/train/test_checkpoint.py", "tests/train/test_trainer.py"),
    ),
)

_DATA = (
    Defect(
        "ranks behind the longer shares read a sample twice",
        "data/loader.py",
        "begin = first + rank * share + min(rank, longer)",
        "begin = first + rank * share",
        ("tests/data/test_train_loader.py",),
    ),
    Defect(
        "the loader's position is that before the batch",
        "data/loader.py",
        "self._consumed, self._yielded, self.indices = step.stop,",
        "self._consumed, self._yielded, self.indices = step.start,",
        ("tests/data/test_train_loader.py",),
    ),
    Defect(
        "every epoch has the same order",
        "data/loader.py",
        "np.random.default_rng([seed, epoch])",
        "np.random.default_rng([seed])",
        ("tests/data/test_train_loader.py",),
    ),
    Defect(
        "every epoch augments an image alike",
        "data/transforms.py",
        "keys = _mix(keys ^ np.uint64(epoch))",
        "keys = _mix(keys)",
        ("tests/data/test_train_loader.py",),
    ),
    Defect(
        "photos lie on their side",
        "data/codec.py",
        "dtype=torch.uint8), _RGB, True)",
        "dtype=torch.uint8), _RGB, False)",
        ("tests/data/test_codec.py",),
    ),
    Defect(
        "a JPEG of a million scans is decoded",
        "data/codec.py",
        "    check_scans(data, name)\n",
        "",
        ("tests/data/test_codec.py",),
    ),
    Defect(
        "a class's record is taken for an image",
        "data/record_dataset.py",
        "announced = (keys >= 1) & (keys < stop)",
        "announced = (keys >= 1) & (keys <= stop)",
        ("tests/data/test_recordio.py",),
    ),
    Defect(
        "records are written that begin between words",
        "data/recordio.py",
        "+ bytes(-len(piece) % 4)",
        "+ bytes(len(piece) % 4)",
        ("tests/data/test_recordio.py",),
    ),
    Defect(
        "faces are aligned half a pixel off",
        "data/alignment.py",
        "grid = (2 * origin + 1) / [width, height] - 1",
        "grid = 2 * origin / [width, height] - 1",
        ("tests/data/test_alignment.py",),
    ),
)

_MODELS_AND_EMBEDDING = (
    Defect(
        "IResNet trains the scale of its embeddings",
        "models/iresnet.py",
        "self.features.weight.requires_grad_(False)",
        "self.features.weight.requires_grad_(True)",
        ("tests/models/test_published_keys.py",),
    ),
    Defect(
        "dropped branches of a ViT are not made up for",
        "models/vit.py",
        "return branch * kept / keep",
        "return branch * kept",
        ("tests/models/test_backbone_contract.py",),
    ),
    Defect(
        "pixels are divided by the deviation before the mean is taken off",
        "models/preprocessing.py",
        ".sub_(subtrahend).div_(_per_channel(std, images))",
        ".div_(_per_channel(std, images)).sub_(subtrahend)",
        ("tests/data/test_normalization.py",),
    ),
    Defect(
        "flip averages an image with itself upside down",
        "plsc/embedding/embedder.py",
        "embedder(images.flip(-1))",
        "embedder(images.flip(-2))",
        ("tests/embedding/test_extract.py",),
    ),
    Defect(
        "an unreadable image has the embedding of a black one",
        "plsc/embedding/pipeline.py",
        "stored[list(errors)] = 0",
        "stored[broken] = 0",
        ("tests/embedding/test_extract.py",),
    ),
    Defect(
        "an export that answers NaN passes its check",
        "plsc/embedding/export.py",
        "difference.nan_to_num(torch.inf)",
        "difference.nan_to_num(0.0)",
        ("tests/embedding/test_export.py",),
    ),
    Defect(
        "embedding goes on with a damaged shard",
        "plsc/embedding/set_writer.py",
        '            verify_files(folder, manifest["files"])\n',
        "",
        ("tests/embedding/test_extract.py",),
    ),
)

_INDEX = (
    Defect(
        "candidates within the rounding error of the best are dropped",
        "plsc/native/scan_kernels.cpp",
        "least = std::max(least, entries[k - 1].score - margin);",
        "least = std::max(least, entries[k - 1].score);",
        ("tests/index/test_scan.py",),
    ),
    Defect(
        "of equal scores the last row comes first",
        "plsc/native/scan_kernels.cpp",
        "(score == other.score && row < other.row)",
        "(score == other.score && row > other.row)",
        ("tests/index/test_scan.py",),
    ),
    Defect(
        "the bound of a scan's error leaves out the rounding of the rows",
        "plsc/index/scan.py",
        "length * (rows.largest_residue + summing)",
        "length * summing",
        ("tests/index/test_scan.py",),
    ),
    Defect(
        "rows behind one that was held out are taken for their neighbours",
        "plsc/index/ann.py",
        "rows = np.where(rows >= 0, self._inside[rows], -1)",
        "rows = np.where(rows >= 0, rows, -1)",
        ("tests/index/test_tuning.py",),
    ),
    Defect(
        "an approximate search filters by the wrong bits",
        "plsc/index/ann.py",
        'np.packbits(allowed, bitorder="little")',
        'np.packbits(allowed, bitorder="big")',
        ("tests/index/test_tuning.py",),
    ),
    Defect(
        "an approximate search returns fewer rows than there are",
        "plsc/index/ann.py",
        "short = (rows < 0).any(axis=1)",
        "short = (rows < 0).all(axis=1)",
        ("tests/index/test_tuning.py",),
    ),
)

_GALLERY = (
    Defect(
        "a filter finds persons that were deleted since",
        "plsc/gallery/sqlite/segments.py",
        "growing_deleted=growing_deleted, masks={})",
        "growing_deleted=growing_deleted)",
        ("tests/gallery/test_sqlite_store.py",),
    ),
    Defect(
        "commits are not synced to disk",
        "plsc/gallery/sqlite/database.py",
        "PRAGMA synchronous = FULL",
        "PRAGMA synchronous = NORMAL",
        ("tests/gallery/test_sqlite_store.py",),
    ),
    Defect(
        "two threads share a transaction",
        "plsc/gallery/sqlite/store.py",
        "        with self._write_lock, self._database.writing() as db:\n            return delete_answers(",
        "        with self._database.writing() as db:\n            return delete_answers(",
        ("tests/gallery/test_sqlite_store.py",),
    ),
    Defect(
        "a vector decrypts as another face's",
        "plsc/gallery/sqlite/encryption.py",
        'return store_id + struct.pack("<q", face)',
        "return store_id",
        ("tests/gallery/test_encryption.py", "tests/gallery/test_encryption_keys.py"),
    ),
    Defect(
        "erased keys are not synced to disk",
        "plsc/gallery/sqlite/encryption.py",
        "                self.table.sync()\n",
        "",
        ("tests/gallery/test_key_erasure.py",),
    ),
    Defect(
        "a former thumbnail is shown of a face that is gone",
        "plsc/gallery/thumbnails.py",
        "self.keeps and face in self._store.person(collection, person).faces:",
        "self.keeps:",
        ("tests/gallery/test_thumbnails.py",),
    ),
    Defect(
        "answers under idempotency keys are forgotten at once",
        "plsc/gallery/retention.py",
        "now(-ANSWERS_KEPT)",
        "now(ANSWERS_KEPT)",
        ("tests/serve/test_repeatable.py",),
    ),
    Defect(
        "rows with an error are enrolled",
        "plsc/gallery/transfer.py",
        "usable[list(source.errors)] = False",
        "usable[list(source.errors)] = True",
        ("tests/gallery/test_sqlite_store.py",),
    ),
    Defect(
        "a score at the threshold is no match",
        "plsc/gallery/person_search.py",
        "if score < threshold or len(best) == k:",
        "if score <= threshold or len(best) == k:",
        ("tests/gallery/test_store_search.py",),
    ),
    Defect(
        "a face is deleted whatever revision was asked for",
        "plsc/gallery/sqlite/changes.py",
        "        precondition.check(owner)\n",
        "        pass\n",
        ("tests/gallery/test_store_repeatable.py",),
    ),
)

_SERVE = (
    Defect(
        "a request more than the limit is taken",
        "plsc/serve/admission.py",
        "if self._in_flight >= self._limits.requests:",
        "if self._in_flight > self._limits.requests:",
        ("tests/serve/test_limits.py",),
    ),
    Defect(
        "a page of another site may call",
        "plsc/serve/admission.py",
        'not in (b"none", b"same-origin")',
        'not in (b"none", b"same-origin", b"same-site")',
        ("tests/serve/test_tokens.py",),
    ),
    Defect(
        "a token of some collections administers all",
        "plsc/serve/access.py",
        "if needed.all_collections and self.collections is not None:",
        "if needed.all_collections and self.collections == frozenset():",
        ("tests/serve/test_rights.py", "tests/serve/test_tokens.py"),
    ),
    Defect(
        "a search of many queries costs as much as one",
        "plsc/serve/rate_limits.py",
        "allowance.charge(count - 1)",
        "allowance.charge(0)",
        ("tests/serve/test_rate_limits.py",),
    ),
    Defect(
        "another body under the same key gets the first one's answer",
        "plsc/serve/idempotency.py",
        "hashlib.sha256(head + hashlib.sha256(body).digest()).digest()",
        "hashlib.sha256(head).digest()",
        ("tests/serve/test_repeatable.py",),
    ),
    Defect(
        "tokens share their idempotency keys",
        "plsc/serve/idempotency.py",
        'token = current_caller().name or ""',
        'token = ""',
        ("tests/serve/test_repeatable.py",),
    ),
    Defect(
        "a write that shares its line's sync with a read is answered before it",
        "plsc/serve/audit.py",
        "durable=any(written for _, written in together)",
        "durable=all(written for _, written in together)",
        ("tests/serve/test_audit.py",),
    ),
    Defect(
        "a caller gets as many matches as another one asked for",
        "plsc/serve/batching.py",
        "groups[search.collection, search.k, search.threshold, matching].append(index)",
        "groups[search.collection, search.threshold, matching].append(index)",
        ("tests/serve/test_batching.py",),
    ),
    Defect(
        "exact scores go to those who get embeddings",
        "plsc/serve/scores.py",
        '0.0 if "vectors" in caller.rights',
        '0.0 if "embeddings" in caller.rights',
        ("tests/serve/test_rights.py",),
    ),
    Defect(
        "a collection takes a person less than its quota",
        "plsc/serve/quotas.py",
        "self._store.collection(collection).persons) + more > limit:",
        "self._store.collection(collection).persons) + more >= limit:",
        ("tests/serve/test_quotas.py",),
    ),
    Defect(
        "a hostile picture may take any memory",
        "plsc/serve/decode_process.py",
        "resource.setrlimit(resource.RLIMIT_AS, (taken + budget, taken + budget))",
        "resource.getrlimit(resource.RLIMIT_AS)",
        ("tests/serve/test_decoding.py",),
    ),
    Defect(
        "a removed token stays in force while its file cannot be read",
        "plsc/serve/token_book.py",
        "self._checked - self._failing_since < _GRACE_SECONDS",
        "self._checked - self._failing_since >= 0",
        ("tests/serve/test_tokens.py",),
    ),
    Defect(
        "the page shows who may only read what writing needs",
        "plsc/serve/page/state.js",
        "RANKS.indexOf(state.info?.role) >= RANKS.indexOf(role)",
        "RANKS.indexOf(state.info?.role) >= RANKS.indexOf(role) - 1",
        ("tests/page/test_page_failures.py",),
    ),
    Defect(
        "the page turns the order of a filter around",
        "plsc/serve/page/scalars.js",
        '"<=": "lte"',
        '"<=": "gte"',
        ("tests/page/test_page_itself.py",),
    ),
    Defect(
        "a change whose answer was lost is sent again",
        "plsc/client.py",
        "isinstance(error, httpx.ConnectError) or",
        "isinstance(error, httpx.TransportError) or",
        ("tests/serve/test_client_retries.py",),
    ),
)

_OTHERS = (
    Defect(
        "averages of weights go with any strategy",
        "plsc/config/checks.py",
        "    _check_averaging(config)\n",
        "",
        ("tests/train/test_averaging_train.py",),
    ),
    Defect(
        "batch normalisation has a single image to average over",
        "plsc/config/checks.py",
        "if config.data.batch_size == 1 and not config.sync_batchnorm:",
        "if config.data.batch_size == 0 and not config.sync_batchnorm:",
        ("tests/test_config.py",),
    ),
    Defect(
        "the plan counts one product of each pass",
        "plsc/plan/timing.py",
        "flops = 4 * samples *",
        "flops = 2 * samples *",
        ("tests/test_plan.py",),
    ),
    Defect(
        "the plan counts a sampled table's rows twice on the bus",
        "plsc/plan/timing.py",
        'row["class weights"] if setup.config.head.sample_rate >= 1 else 0',
        'row["class weights"]',
        ("tests/test_plan.py",),
    ),
    Defect(
        "the plan forgets the samples that wait for the second pass",
        "plsc/plan/memory.py",
        "return setup.micro_batches * (embeddings + sampled)",
        "return embeddings + sampled",
        ("tests/test_plan.py", "tests/test_plan_traced.py"),
    ),
    Defect(
        "a true-accept rate breaks a tie at its false-accept rate the wrong way",
        "plsc/evaluation/roc.py",
        'points = int(np.searchsorted(roc.impostors, allowed, side="right"))',
        'points = int(np.searchsorted(roc.impostors, allowed, side="left"))',
        ("tests/evaluation/test_roc.py",),
    ),
    Defect(
        "a calibration refuses the last rate that ten impostors support",
        "plsc/evaluation/calibration.py",
        "    if allowed < MINIMUM_IMPOSTORS:",
        "    if allowed <= MINIMUM_IMPOSTORS:",
        ("tests/evaluation/test_calibration.py",),
    ),
    Defect(
        "IJB's media weigh as much as they have frames",
        "plsc/evaluation/templates.py",
        "scores[order] / np.repeat(faces_of_medium, faces_of_medium)",
        "scores[order]",
        ("tests/evaluation/test_ijb.py",),
    ),
    Defect(
        "one vector for everybody identifies everybody",
        "plsc/evaluation/gallery.py",
        "np.sum(scores >= own_score[part, None], axis=1) - 1",
        "np.sum(scores > own_score[part, None], axis=1)",
        ("tests/evaluation/test_gallery.py",),
    ),
    Defect(
        "folds choose their threshold by looking at themselves",
        "plsc/evaluation/pairs.py",
        "best = np.argmax(correct.sum(axis=0) - correct, axis=1)",
        "best = np.argmax(correct, axis=1)",
        ("tests/evaluation/test_pairs.py",),
    ),
    Defect(
        "the doctor calls training sound that is not",
        "plsc/doctor/training.py",
        "error = max(abs(mine - other) / abs(other)",
        "error = min(abs(mine - other) / abs(other)",
        ("tests/doctor/test_doctor.py",),
    ),
    Defect(
        "the doctor passes a failure of any rank but the first",
        "plsc/doctor/report.py",
        "shown = next(iter(wrong.values()), first)",
        "shown = wrong.get(0, first)",
        ("tests/doctor/test_report.py",),
    ),
    Defect(
        "the quickstart is judged on identities that it has trained on",
        "plsc/quickstart/steps.py",
        'UNSEEN = "avatars:400x6@1000000"',
        'UNSEEN = "avatars:400x6@1000"',
        ("tests/quickstart/test_quickstart.py",),
    ),
    Defect(
        "a file is named before its content is on the disk",
        "plsc/files.py",
        "            yield tmp_path\n            sync(tmp_path)\n",
        "            yield tmp_path\n",
        ("tests/test_files.py",),
    ),
    Defect(
        "a folder is named before its files are on the disk",
        "plsc/files.py",
        "        if path.is_file():\n            sync(path)\n",
        "        pass\n",
        ("tests/test_files.py",),
    ),
    Defect(
        "a full disk leaves half a line in a log",
        "plsc/files.py",
        "os.ftruncate(self._file, size)",
        "os.fstat(self._file)",
        ("tests/train/test_full_disk.py",),
    ),
    Defect(
        "a signature vouches for a manifest's keys and not for its values",
        "plsc/signing.py",
        "{canonical_json(content)}",
        "{canonical_json(sorted(content))}",
        ("tests/test_signing.py",),
    ),
)

DEFECTS = (
    *_HEAD,
    *_LOSSES_AND_OPTIMIZERS,
    *_PARALLEL,
    *_TRAIN,
    *_DATA,
    *_MODELS_AND_EMBEDDING,
    *_INDEX,
    *_GALLERY,
    *_SERVE,
    *_OTHERS,
)
