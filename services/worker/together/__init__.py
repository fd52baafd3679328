"""Workers that share the stage of one job: captures by several, and trainings on several hosts."""
