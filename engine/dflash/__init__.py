"""What a DFlash drafter computes: tensors in, tensors out, usable from a notebook.

Reading order: `configuration`, `packing`, `anchors`, `attention_mask`, `drafter`, `objective`,
`decoding`, `export`. Nothing here knows of threads, streams or schedules.
"""
