"""A plan of a job by the files that it names, without torch: the plan of the API.

The student is told by the shapes of its tensors (``kd.planning.shapes``), and what autograd keeps
by these shapes. ``kd plan`` measures both.
"""

from __future__ import annotations

from kd.config.job import JobConfig
from kd.loss.chunk_size import suits_kernels
from kd.memory.training_phase import TrainingPhase
from kd.planning.devices import DeviceGroup
from kd.planning.plan import TrainingPlan, make_plan
from kd.planning.shapes import describe_student_files
from kd.planning.texts import TextFiles, find_text_size


def plan_by_files(
    config: JobConfig, files: TextFiles, devices: DeviceGroup, price: float | None = None
) -> TrainingPlan | None:
    """Plan the training of ``config``; ``price`` is that of an hour of one device.

    None for a job that trains nothing, and where its files do not tell the student or the steps.
    Raises ``ConfigError`` where a step cannot be split over the devices, and ``ModelError`` where a
    model's configuration cannot be read.
    """
    if config.train is None or config.student is None:
        return None
    student = describe_student_files(config, files.root, files.find_vocabulary)
    text = find_text_size(config, files)
    steps = config.train.count_steps(text.train)
    if student is None or steps is None:
        return None
    training = TrainingPhase(
        student=student.shape,
        options=config.train,
        vocabulary=student.shape.head.rows,
        length=text.length,
        targets=text.targets,
        steps=steps,
        evaluations=2 + steps // config.train.eval_steps,
        held_out=text.validation,
        loader=text.loader,
        saved=student.saved,
        model=student.work,
        suits_kernels=suits_kernels(text.codec, config.loss.divergence),
    )
    return make_plan(training, devices, price)
