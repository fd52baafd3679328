"""What the teacher reads in place of what the student reads."""
