"""In-depth evaluation of a student: the teacher's whole distribution, samples, tasks and plots."""
