"""All that a first hour on a GPU should settle, in parts that cannot take each other's time: `deploy/gpu-check`.

lines        results as JSON lines on standard output
machine      what the machine is
correct      part 1: programs that compilers got wrong, and the tests that need a GPU
steps        parts 2 and 7: training steps beside PyTorch
attention    part 3: attention beside float64, and its time
pairs        a variant of a step beside another one, in turns
passes       part 4: each pass for GPUs, with and without
precisions   part 5: fp16 with skips, fp8, bf16_compute
resume       part 6: the same bits after a resume
parts        the parts, with their limits
process      a command that cannot outlive its limit
summary      the results as a page of Markdown
__main__     the command
"""
