"""The keys of [data]: the images of a run, and the preprocessing contract that they make."""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from plsc.errors import UsageError
from plsc.toml_keys import key, toml_value

if TYPE_CHECKING:
    from plsc.config.sections import Config  # which imports this module
    from plsc.models.preprocessing import Preprocessing


@dataclass(frozen=True)
class DataConfig:
    """[data]: the images to train on.

    Attributes:
        train: Training images: a folder per class, a list file (a line path<TAB>label per image); .rec, .tar, .parquet,
            .arrow or .lance files; a bucket; or what plsc draws: avatars:IDENTITIESxIMAGES or glyphs:BLOCK.
        labels: Labels of the images in place of their own: labels.npy or top_labels.npy (several of each) of plsc
            cluster, for an embedding set of data.train; images of label -1 are left out.
        image_size: Size in pixels that images are resized to: the side of a square, or [height, width]; unset: that of
            init_weights, or 112.
        interpolation: Interpolation by which images are resized; unset: that of init_weights, or bilinear.
        mean: Mean of the pixel values, from 0 to 255, that is subtracted: one number, or [red, green, blue]; unset:
            that of init_weights, or 127.5.
        std: Standard deviation of the pixel values, by which they are divided then: one number, or [red, green, blue];
            unset: that of init_weights, or 127.5.
        batch_size: Images per rank and micro-batch; the global batch is this × ranks × optim.accumulate.
        augment: Augmentation: flip mirrors half of the images; affine rotates, scales, shears and shifts slightly
            without mirroring; elastic does more of it, and bends; standard adds crop, colour, greyscale, blur, low
            resolution, JPEG and erasing to flip and affine.
        rotation_classes: Add every class rotated by 90, 180 and 270 degrees as a class of its own; epochs take four
            times as long.
        workers: Processes per rank that read and augment images ahead; auto: as many as cores are left, 1 to 8; 0 reads
            in the training process.
        label_columns: Labels taken of a picture that has several, the first ones; 1 as arcface_torch; unset: all.
        max_bad_records: Unreadable images, in whose places the next ones are taken, before the run stops with an error.
        cache: Keep decoded images over the epochs, for all ranks of a machine together: memory; disk:PATH, files in the
            folder PATH, which no other user may write to, for later runs too: as long as names, sizes and times of the
            pictures' files stay (remove files of former ones yourself); auto, memory where they take at most an eighth
            of what is free; or none.
    """

    train: str = key("avatars:2000x30", also_called=("dataset", "data_dir", "root"))
    labels: str = key("")
    image_size: int | tuple[int, ...] | None = key(None, least=16, is_fixed=True)
    interpolation: str | None = key(None, choices=("bilinear", "bicubic"), is_fixed=True)
    mean: float | tuple[float, ...] | None = key(None, least=0, most=255, is_fixed=True)
    std: float | tuple[float, ...] | None = key(None, above=0, is_fixed=True)
    batch_size: int = key(128, least=1, also_called=("bs",))
    augment: str = key("flip", choices=("none", "flip", "affine", "elastic", "standard"), in_stages=True)
    rotation_classes: bool = key(False, renamed_from="turned_classes")
    workers: int | str = key("auto", choices=("auto",), least=0)
    label_columns: int | None = key(None, least=1)
    max_bad_records: int = key(1000, least=0)
    cache: str = key("auto", choices=("auto", "memory", "disk:PATH", "none"))

    @property
    def preprocessing(self) -> "Preprocessing":
        """The preprocessing contract of the run; where a key is unset, with plsc's own values."""
        from plsc.models.preprocessing import Preprocessing

        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(Preprocessing)}
        return Preprocessing(**{name: value for name, value in values.items() if value is not None})

    def with_contract(self, contract: "Preprocessing") -> "DataConfig":
        """Return these keys with those of the preprocessing contract set."""
        values = {field.name: getattr(contract, field.name) for field in dataclasses.fields(contract)}
        return dataclasses.replace(self, **values)

    def refusals(self, run: "Config") -> Iterator[str]:
        """Say, one after another, what of ``run`` does not go with these keys."""
        if self.batch_size == 1 and not run.sync_batchnorm:
            yield "data.batch_size = 1 leaves batch normalisation nothing to average; give 2 or more"
        if all(value is None for value in (self.image_size, self.mean, self.std)):
            return
        try:
            image_size = self.preprocessing.image_size
        except UsageError as error:
            yield f"data.{error}"
            return
        for name, value in (("mean", self.mean), ("std", self.std)):
            numbers = value if isinstance(value, tuple) else (value or 0.0,)
            if 0 < max(numbers) < 1:
                scaled = toml_value([round(255 * number, 3) for number in numbers])
                yield f"data.{name} = {toml_value(value)} is of values 0 to 1; of pixels 0 to 255 it is {scaled}"
        for name, rotates in (("data.rotation_classes", self.rotation_classes), ("rotation_tta", run.rotation_tta)):
            if rotates and not isinstance(image_size, int):
                yield (
                    f"{name} rotates images by 90 degrees, and data.image_size = {toml_value(self.image_size)} is no "
                    "square; leave one of them out"
                )
