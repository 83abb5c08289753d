"""What people met in engines of this kind, row by row.

The field reports are a table of bugs that others reported against vLLM,
nano-vllm, SGLang and more. `SECTIONS` holds the rows that engines and servers
of today can meet, each by the first report it names. A row is tested here, by a
test that begins with its name, or elsewhere (`ROWS`), or it waits (`LATER`).

Most rows concern both engines. Those of sections 1 to 8 are tested on V0 as
well: here, by tests with `v0` in their name and by those that run on both, or
elsewhere (`V0_ROWS`); `NOT_V0` says why a few cannot be.
"""
import ast
import asyncio
import functools
import itertools
import json
import random
import re
from pathlib import Path

import pytest
import torch
from front_tiny import ARGS, ToyExecutor, make_config, make_folder
from scheduling import counts, make_request, make_scheduler, names, step
from server_tiny import ENGINES, ask, make_v1
from v0_front import ToyExecutor as V0ToyExecutor
from v0_front import assert_at_rest, run
from v0_front import make_config as make_v0_config
from v0_front import make_engine as make_v0_engine
from v0_scheduling import chunks
from v0_scheduling import make_group as make_v0_group
from v0_scheduling import make_scheduler as make_v0_scheduler
from v0_scheduling import step as v0_step
from v1_tiny import Engine, alone, random_prompt

from minengine.config import SchedulerConfig
from minengine.llm import LLM
from minengine.sampling_params import RequestOutputKind, SamplingParams
from minengine.server.api_server import build_app
from minengine.server.chat import Serving
from minengine.server.fields import check_request
from minengine.server.protocol import CompletionRequest
from minengine.tokenizer import ByteTokenizer
from minengine.v0.async_llm_engine import AsyncLLMEngine
from minengine.v0.cpu_gpu_allocator import Device
from minengine.v0.llm_engine import LLMEngineV0
from minengine.v1.engine.llm_engine import LLMEngineV1
from minengine.v1.request import RequestStatus

TESTS, NOTEBOOKS = Path(__file__).parent, Path(__file__).parents[1] / "nbs"
SPECIAL = 258   # <|system|> of the byte tokenizer
quick = dict(use_tqdm=False)

# By section of the reports.
SECTIONS = {
    # scheduler: admission, budget, preemption, starvation
    1: ["nano-vllm#144 (part 1)", "vllm#2163", "vllm#45414", "vllm#28558", "vllm#49097", "vllm#41951", "vllm#9342",
        "vllm-project/vllm-metal#200", "vllm#18411", "vllm#27367", "vllm#21809", "vllm#53130", "vllm#25890"],
    # V0: swapping, groups, several answers
    2: ["vllm#5578", "vllm#4451", "vllm#14326", "vllm#11898", "vllm#190"],
    # blocks: leaks, double frees, stale entries
    3: ["nano-vllm#163", "vllm#42571", "vllm#37076", "sglang#35270", "sgl-project/sglang-jax#982", "sglang#36855",
        "mini-sglang#142", "bytedance-iaas/sglang#508", "sglang#38355", "nano-vllm#66"],
    # prefix cache: keys, wrong hits, full hits, prompt logprobs
    4: ["vllm#12621", "vllm#20261", "vllm#36708", "vllm#3264", "vllm#30931", "vllm#42125", "nano-vllm#199",
        "vllm#30320", "vllm#3251", "vllm#23399", "vllm#42245", "vllm#5344", "vllm#3355", "vllm#57610"],
    # bad input
    5: ["vllm#12600", "vllm#40302", "vllm#54195", "vllm-project/vllm-ascend#15228", "vllm#48567", "vllm#29355",
        "vllm#8393", "vllm#42474", "vllm#40689", "vllm#19861"],
    # text, stop strings, ends
    6: ["vllm#3574", "vllm#2577", "vllm#3672", "vllm#21987", "vllm#26317", "vllm#5849", "vllm#4589", "vllm#32163",
        "vllm#792", "vllm#984", "vllm#21951", "waybarrios/vllm-mlx#109", "vllm#4188"],
    # sampling, penalties, seeds, logprobs
    7: ["nano-vllm#249", "vllm#6719", "vllm#22180", "vllm-project/vllm-metal#646", "vllm#5639", "vllm#57719",
        "vllm-project/vllm-metal#69", "EleutherAI/lm-evaluation-harness#3154", "vllm#17929", "vllm#9453", "vllm#15420",
        "vllm#44319", "vllm#5334", "nano-vllm#260"],
    # determinism
    8: ["vllm#5898", "vllm#23138", "vllm#7779"],
    # engine process, aborts, messages
    9: ["vllm#42157", "vllm#25067", "vllm#9428", "vllm#21728", "vllm#36451", "vllm#11996", "LMCache/LMCache#3529", "vllm#7222",
        "vllm#15207", "tenstorrent/tt-xla#3310", "vllm#12918"],
    # streams, OpenAI's API
    10: ["vllm#7262", "vllm#6371", "vllm#6652", "vllm#8625", "vllm#19662", "vllm#35705", "vllm#2706", "vllm#1992", "vllm#47815",
         "vllm#39279", "vllm#25001"],
    # drafts
    12: ["vllm#14519", "vllm#16087", "vllm#22935", "vllm#58080", "vllm#13933", "vllm#15554"],
    # graphs, compiling, slots
    13: ["vllm#13418", "vllm#1486", "vllm#11596", "vllm#28759"],
    # weights, config, parallel sizes, types
    14: ["sglang#18024", "QwenLM/Qwen3-VL-Embedding#89", "vllm#40765", "vllm#32673", "vllm#7953", "vllm#2652",
         "transformers#48307", "vllm#49795", "vllm#4057", "vllm#12794", "vllm#9729"],
    # memory
    15: ["vllm#19312", "vllm#55169", "vllm#2418"],
}

# Row -> the tests elsewhere that cover it.
ROWS = {
    "vllm#14519": "test_spec_decode.py::test_field_vllm_14519_13673_all_drafts_kept_gives_one_token_more",
    "vllm#16087": "test_spec_decode.py::test_field_vllm_16087_drafts_at_the_end_of_the_window "
                  "test_v0_spec_decode.py::test_field_vllm_16087_v0_drafts_end_before_the_window",
    "vllm#22935": "test_spec_decode.py::test_field_vllm_22935_5342_57941_a_draft_model_with_a_shorter_window",
    "vllm#58080": "test_spec_decode.py::test_field_vllm_58080_past_its_window_a_request_has_no_draft_and_its_neighbours_have",
    "vllm#13933": "test_spec_decode.py::test_field_vllm_13933_drafting_knows_nothing_of_wishes_and_the_sampler_all "
                  "test_v0_spec_decode.py::test_every_wish_gives_the_tokens_and_logprobs_that_it_gives_without_drafts",
    "vllm#15554": "test_spec_decode.py::test_field_vllm_15554_20284_pairs_that_do_not_work_are_refused_at_the_start "
                  "test_spec_decode.py::test_field_vllm_15554_20284_guided_output_and_adapters_are_refused_with_drafts_as_without",
    "nano-vllm#144 (part 1)": "test_model_runner.py::test_field_nano_vllm_144_preempted_after_output_is_recomputed",
    "vllm#2163": "test_engine_core.py::test_field_vllm2163_vllm2418_a_pool_too_small_for_one_request "
                 "test_bad_input.py::test_engine_arguments",
    "vllm#28558": "test_scheduler.py::test_preemption_clears_drafts",
    "vllm#18411": "test_kv_cache_manager.py::test_failed_allocation_changes_nothing",
    "vllm#27367": "test_model_runner.py::test_field_vllm_27367_any_batch_gives_the_tokens_of_a_request_alone",
    "vllm#53130": "test_scheduler.py::test_max_num_seqs_limits_what_runs",

    "vllm#5578": "test_v0_engine.py::test_field_vllm5578_many_groups_do_not_fill_the_swap_space "
                 "test_v0_scheduler.py::test_no_new_groups_of_several_while_some_are_swapped_out",
    "vllm#4451": "test_v0_engine.py::test_field_vllm4451_groups_are_swapped_and_go_on "
                 "test_v0_scheduler.py::test_swapped_come_back",
    "vllm#14326": "test_v0_engine.py::test_field_vllm14326_abort_reaches_every_sequence "
                  "test_v0_async_engine.py::test_n_streams_and_aborts_as_one",
    "vllm#11898": "test_v0_output_processor.py::test_field_vllm11898_each_child_streams_until_its_own_end "
                  "test_v0_sampler.py::test_field_vllm_11898_answer_i_has_the_seed_plus_i "
                  "test_equality.py::test_v0_four_answers_are_four_requests_with_the_next_seeds",
    "vllm#190": "test_v0_worker.py::test_field_vllm_190_out_and_in_while_others_use_the_blocks",

    "nano-vllm#163": "test_kv_cache_manager.py::test_reused_block_is_forgotten",
    "vllm#42571": "test_kv_cache_manager.py::test_double_free",
    "vllm#37076": "test_model_runner.py::test_field_vllm_37076_nan_in_freed_blocks_never_reaches_an_output "
                  "test_kv_cache_manager.py::test_hits_are_held_before_others_are_taken",
    "sglang#35270": "test_kv_cache_manager.py::test_idle_pool_counts_shared_blocks_once",
    "bytedance-iaas/sglang#508": "test_kv_cache_manager.py::test_idle_pool_counts_shared_blocks_once",
    "sglang#38355": "test_kv_cache_manager.py::test_abort_between_chunks_drops_only_its_own_reference",
    "nano-vllm#66": "test_kv_cache_manager.py::test_prompt_of_exactly_one_block_then_decode",

    "vllm#12621": "test_kv_cache_manager.py::test_hash_is_the_same_in_every_process",
    "vllm#20261": "test_kv_cache_manager.py::test_same_text_other_picture_never_hits",
    "vllm#36708": "test_kv_cache_manager.py::test_two_layouts_of_one_image_have_different_keys",
    "vllm#3264": "test_kv_cache_manager.py::test_adapters_never_share_blocks",
    "vllm#30931": "test_kv_cache_manager.py::test_adapters_never_share_blocks",
    "nano-vllm#199": "test_scheduler.py::test_full_hit_recomputes_one_block "
                     "test_equality.py::test_tiny_models_equal_transformers",
    "vllm#30320": "test_scheduler.py::test_full_hit_recomputes_one_block",
    "vllm#3251": "test_scheduler.py::test_prompt_logprobs_skip_the_cache "
                 "test_kv_cache_manager.py::test_prompt_logprobs_skip_reads_and_still_write",
    "vllm#3355": "test_checkpoint.py::test_prefix_caching_with_a_sliding_window_in_the_config "
                 "test_models.py::test_sliding_windows",

    "vllm#12600": "test_processor.py::test_field_vllm12600_prompt_longer_than_the_model "
                  "test_bad_input.py::test_prompt_longer_than_the_model",
    "vllm#40302": "test_processor.py::test_field_vllm40302_a_lowered_limit_is_the_only_one "
                  "test_bad_input.py::test_prompt_longer_than_the_pool",
    "vllm#54195": "test_processor.py::test_field_vllm54195_ids_are_checked_against_the_logits_width "
                  "test_logits.py::test_vllm_54195_an_id_outside_never_lands_in_a_neighbour",
    "vllm-project/vllm-ascend#15228": "test_processor.py::test_field_vllm54195_ids_are_checked_against_the_logits_width",
    "vllm#48567": "test_output_processor.py::test_field_vllm48567_ids_outside_the_vocabulary_have_no_text "
                  "test_tokenizer.py::test_ids_outside_the_vocabulary",
    "vllm#29355": "test_output_processor.py::test_field_vllm29355_an_id_is_free_at_once_and_late_outputs_hurt_nobody",
    "vllm#8393": "test_output_processor.py::test_field_vllm8393_an_id_in_use_is_refused_and_the_first_goes_on "
                 "test_scheduler.py::test_an_id_in_use_is_refused",
    "vllm#42474": "test_processor.py::test_field_vllm42474_max_tokens_past_the_window_is_clamped "
                  "test_bad_input.py::test_a_huge_max_tokens_is_clamped_for_generate_and_chat",
    "vllm#40689": "test_llm.py::test_field_vllm40689_the_template_is_counted",

    "vllm#3574": "test_output_processor.py::test_field_vllm3574_vllm2577_streams_never_leak_a_stop_string "
                 "test_tokenizer.py::test_stop_string_is_found_once_it_is_there "
                 "test_server_serving.py::test_stop_strings",
    "vllm#2577": "test_output_processor.py::test_field_vllm3574_vllm2577_streams_never_leak_a_stop_string "
                 "test_server_serving.py::test_stop_strings",
    "vllm#3672": "test_output_processor.py::test_field_vllm3672_stop_string_inside_and_across_tokens",
    "vllm#21987": "test_output_processor.py::test_field_vllm21987_stop_strings_wait_for_min_tokens",
    "vllm#26317": "test_model_runner.py::test_field_vllm_26317_min_tokens_holds_back_the_end",
    "vllm#5849": "test_sampler.py::test_vllm_5849_no_stop_token_before_min_tokens "
                 "test_processor.py::test_field_vllm5849_all_eos_ids_are_known",
    "vllm#32163": "test_input_batch.py::test_field_vllm_5849_32163_min_tokens_masks_every_end_token "
                  "test_logits.py::test_min_tokens_equals_transformers_and_masks_every_stop_id",
    "vllm#792": "test_output_processor.py::test_field_vllm792_special_tokens_stop_by_id_not_by_string",
    "vllm#984": "test_tokenizer.py::test_output_after_a_prompt",
    "vllm#21951": "test_output_processor.py::test_field_vllm21951_a_failing_detokenizer_ends_its_request_only "
                  "test_async_llm.py::test_one_broken_answer_ends_alone",
    "waybarrios/vllm-mlx#109": "test_output_processor.py::test_field_vllm_mlx109_no_half_characters_in_a_stream "
                               "test_tokenizer.py::test_never_half_a_character "
                               "test_openai_client.py::test_completions",
    "vllm#4188": "test_output_processor.py::test_field_vllm4188_the_prompt_is_not_searched",

    "nano-vllm#249": "test_sampler.py::test_nano_vllm_249_greedy_rows_leave_the_draws_of_others_alone",
    "vllm#6719": "test_sampler.py::test_vllm_6719_greedy_ignores_the_cuts_and_draws_nothing",
    "vllm#22180": "test_logits.py::test_temperature_equals_transformers_and_greedy_rows_are_divided_by_one",
    "vllm-project/vllm-metal#646": "test_sampler.py::test_vllm_metal_646_a_greedy_row_beside_top_k "
                                   "test_logits.py::test_vllm_metal_646_top_k_off_or_too_large_beside_a_small_one",
    "vllm#5639": "test_sampler.py::test_vllm_5639_the_order_of_requests_does_not_matter "
                 "test_model_runner.py::test_repetition_penalty_over_chunks_and_moves_equals_alone",
    "vllm#57719": "test_logits.py::test_vllm_57719_rows_of_very_different_length_and_missing_ids "
                  "test_input_batch.py::test_pad_prompts",
    "vllm-project/vllm-metal#69": "test_logits.py::test_vllm_metal_69_prompt_tokens_count_for_repetition_only "
                                  "test_sampler.py::test_bias_and_penalties_hold_for_greedy_rows",
    "EleutherAI/lm-evaluation-harness#3154": "test_llm.py::test_field_lm_eval3154_defaults_come_from_the_model "
                                             "test_server_serving.py::test_defaults_of_the_model",
    "vllm#17929": "test_model_runner.py::test_field_vllm_17929_11953_the_global_generator_is_left_alone "
                  "test_sampler.py::test_two_samplers_agree_step_by_step",
    "vllm#9453": "test_sampler.py::test_vllm_9453_raw_logprobs_are_the_models_own "
                 "test_sampler.py::test_processed_logprobs_are_those_that_were_drawn_from",
    "vllm#15420": "test_model_runner.py::test_field_vllm_15420_prompt_logprobs_over_chunks_equal_a_plain_forward "
                  "test_openai_client.py::test_prompt_logprobs",
    "vllm#44319": "test_output_processor.py::test_field_vllm44319_entries_are_kept_by_id "
                  "test_logits.py::test_the_first_k_do_not_depend_on_k "
                  "test_server_serving.py::test_top_logprobs_keep_every_token",
    "vllm#5334": "test_tokenizer.py::test_decode_token_is_its_own_piece "
                 "test_server_serving.py::test_echo_logprobs_stream",
    "nano-vllm#260": "test_logits.py::test_nano_vllm_260_the_token_that_crosses_the_threshold_is_kept",

    "vllm#5898": "test_llm.py::test_alone_and_together_are_equal test_equality.py::test_smollm2_equals_transformers",

    "sglang#18024": "test_models.py::test_sglang_18024_an_untied_head_stays_its_own "
                    "test_checkpoint.py::test_untied_head_is_kept",
    "QwenLM/Qwen3-VL-Embedding#89": "test_models.py::test_qwen3_vl_embedding_89_untied_but_no_head_is_stored "
                                    "test_checkpoint.py::test_untied_without_a_head",
    "vllm#40765": "test_checkpoint.py::test_sharded_with_stray_file",
    "vllm#32673": "test_models.py::test_vllm_32673_prefixes_of_larger_models test_checkpoint.py::test_name_prefixes",
    "vllm#7953": "test_checkpoint.py::test_folders_that_are_no_model",
    "vllm#2652": "test_parallel.py::test_vllm_2652_heads_that_do_not_divide",
    "transformers#48307": "test_parallel.py::test_transformers_48307_kv_heads_are_replicated",
    "vllm#49795": "test_models.py::test_vllm_49795_the_layer_type_decides_not_the_field",
    "vllm#4057": "test_equality.py::test_tiny_models_equal_transformers",   # the family with a window, in chunks
    "vllm#12794": "test_checkpoint.py::test_float16_on_cpu_becomes_float32",
    "vllm#9729": "test_models.py::test_vllm_9729_half_precision "
                 "test_layers.py::test_vllm_9729_norm_rounds_where_transformers_rounds",

    "vllm#19312": "test_worker.py::test_field_vllm_19312_memory_of_others_is_not_charged",
    "vllm#55169": "test_worker.py::test_field_vllm_55169_2418_senseless_sizes_are_refused_with_the_numbers "
                  "test_llm.py::test_start_up_says_what_runs",
    "vllm#2418": "test_engine_core.py::test_field_vllm2163_vllm2418_a_pool_too_small_for_one_request",

    "vllm#42157": "test_scheduler.py::test_abort_between_schedule_and_update "
                  "test_engine_core.py::test_abort_of_one_while_others_run",
    "vllm#25067": "test_scheduler.py::test_abort_of_a_finished_request_does_nothing "
                  "test_core_process.py::test_aborts_of_the_unknown_the_finished_and_twice",
    "vllm#9428": "test_server.py::test_field_vllm9428_a_client_that_leaves_ends_its_request "
                 "test_async_llm.py::test_blocks_are_back_at_the_next_step "
                 "test_server_crowd.py::test_a_third_leaves_and_nothing_stays",
    # with vllm#24897
    "vllm#21728": "test_server.py::test_field_vllm21728_the_engine_process_is_killed_under_load "
                  "test_core_process.py::test_kill_9_reaches_every_awaited_call "
                  "test_core_process.py::test_no_way_out_leaves_an_orphan "
                  "test_server_crowd.py::test_smollm2_kill_9_of_the_engine_under_load",
    # with vllm#39863
    "vllm#36451": "test_core_process.py::test_a_stuck_loop test_async_llm.py::test_a_stuck_core_is_found_out "
                  "test_v0_async_engine.py::test_health_waits_for_a_step_but_not_for_ever "
                  "test_server.py::test_an_engine_that_does_not_answer",
    "LMCache/LMCache#3529": "test_core_process.py::test_a_long_temporary_folder "
                            "test_core_process.py::test_no_short_folder_at_all",
    # with vllm#7196, vllm#24756
    "vllm#7222": "test_core_process.py::test_two_engines_side_by_side_and_one_ends "
                 "test_core_process.py::test_no_short_folder_at_all test_server.py::test_two_servers_side_by_side",
    "vllm#15207": "test_wire.py::test_a_frame_is_never_used_twice test_wire.py::test_trailing_bytes_and_frames_are_refused "
                  "test_wire.py::test_damaged_messages_raise_nothing_else "
                  "test_core_process.py::test_bad_frames_harm_nobody",
    "tenstorrent/tt-xla#3310": "test_wire.py::test_numpy_scalars_become_plain_numbers "
                               "test_core_process.py::test_an_output_that_cannot_travel_harms_its_request",
    "vllm#12918": "test_wire.py::test_tensors_of_every_dtype test_wire.py::test_nothing_is_ever_unpickled",

    "vllm#1992": "test_server_serving.py::test_echo_logprobs_stream",
    "vllm#47815": "test_server_serving.py::test_echo_logprobs_stream "
                  "test_server_serving.py::test_offsets_where_characters_take_several_tokens",
    # with vllm#29849, microsoft/agent-lightning#57
    "vllm#39279": "test_server_serving.py::test_chat_template_missing_or_failing",
    "vllm#25001": "test_server_serving.py::test_chat_reads_as_the_template_writes "
                  "test_openai_client.py::test_messages_of_every_form",

    # with vllm#13922
    "vllm#13418": "test_graphs.py::test_field_vllm_13418_vllm_13922_five_tokens_padded_to_eight_write_five_slots "
                  "test_graphs.py::test_v0_recording_and_replaying_writes_only_real_slots "
                  "test_graphs.py::test_planted_v0_a_padded_row_with_a_slot "
                  "test_model_runner.py::test_field_vllm_13418_13922_the_padded_tail_never_writes_kv "
                  "test_v0_model_runner.py::test_field_vllm_13418_padded_rows_write_nowhere "
                  "test_kv_cache.py::test_vllm_13418_the_slots_decide_how_many_rows_are_written "
                  "test_triton_attention.py::test_write_kv_in_the_interpreter",
    "vllm#1486": "test_input_batch.py::test_field_vllm_1486_slots_equal_the_loop_and_are_wide "
                 "test_kv_cache.py::test_vllm_1486_offsets_beyond_32_bits "
                 "test_attention.py::test_vllm_1486_offsets_beyond_32_bits "
                 "test_triton_attention.py::test_edges_in_the_interpreter",
    "vllm#11596": "test_graphs.py::test_field_vllm_11596_an_input_that_was_rebound "
                  "test_graphs.py::test_field_vllm_11596_v0_buffers_are_filled_not_replaced "
                  "test_graphs.py::test_planted_inputs_of_a_step_are_rebound "
                  "test_graphs.py::test_a_fault_in_a_running_engine_is_no_silent_nonsense "
                  "test_model_runner.py::test_field_vllm_11596_buffers_keep_their_addresses",
    # with vllm#14953 and vllm#53366
    "vllm#28759": "test_compilation.py::test_field_vllm_28759_vllm_14953_vllm_53366_a_changed_model_gets_its_own_programs "
                  "test_compilation.py::test_field_vllm_28759_a_piece_that_holds_a_tensor_is_equal_to_itself_alone "
                  "test_compilation.py::test_two_compiled_engines_side_by_side test_compilation.py::test_pieces_that_differ",
}

# Row -> the tests elsewhere that run it on V0, besides those that run on both.
V0_ROWS = {
    "nano-vllm#144 (part 1)": "test_v0_model_runner.py::test_field_nano_vllm_144_decoding_without_a_cache_is_an_error "
                              "test_v0_model_runner.py::test_recompute_of_prompt_and_output_gives_the_next_token",
    "vllm#2163": "test_v0_engine.py::test_pools_that_are_too_small "
                 "test_v0_engine.py::test_a_pool_that_is_accepted_serves_everybody",
    "vllm#9342": "test_v0_scheduler.py::test_an_urgent_request_among_many",
    "vllm#18411": "test_v0_blocks.py::test_allocation_is_all_or_nothing",
    "vllm#27367": "test_v0_model_runner.py::test_any_schedule_gives_dense_logits "
                  "test_equality.py::test_both_engines_give_the_tokens_of_a_request_alone",

    "nano-vllm#163": "test_v0_blocks.py::test_a_block_reused_is_not_found_by_its_old_name",
    "vllm#42571": "test_v0_blocks.py::test_double_free test_v0_blocks.py::test_sliding_window",
    "sglang#35270": "test_v0_blocks.py::test_free_counts_while_a_shared_chain_is_freed",
    "mini-sglang#142": "test_v0_blocks.py::test_promotion_changes_the_id "
                       "test_v0_blocks.py::test_promotion_leaves_copies_of_this_step_alone",
    "sglang#38355": "test_v0_blocks.py::test_an_unfinished_prompt_is_not_a_prefix "
                    "test_v0_scheduler.py::test_blocks_of_a_prompt_cut_short_are_computed",
    "nano-vllm#66": "test_v0_blocks.py::test_prompt_that_fills_its_last_block",

    "vllm#12621": "test_v0_blocks.py::test_hash_does_not_collide",
    "vllm#3264": "test_v0_blocks.py::test_adapters_do_not_share",
    "vllm#30931": "test_v0_blocks.py::test_computed_blocks_tracker_sees_the_adapter",
    "nano-vllm#199": "test_v0_blocks.py::test_full_hit "
                     "test_v0_model_runner.py::test_prefill_chunk_decode_and_prefix_hit_equal_a_dense_forward",
    "vllm#30320": "test_v0_scheduler.py::test_a_full_hit_computes_one_token",
    "vllm#3251": "test_v0_model_runner.py::test_field_vllm_3251_42245_skipped_positions_are_an_error",
    "vllm#3355": "test_v0_blocks.py::test_sliding_window",

    "vllm#12600": "test_bad_input.py::test_prompt_longer_than_the_model "
                  "test_v0_engine.py::test_a_prompt_that_is_too_long_is_ignored",
    "vllm#40302": "test_v0_engine.py::test_pools_that_are_too_small",
    "vllm#48567": "test_v0_output_processor.py::test_field_vllm48567_an_error_ends_its_own_request_only "
                  "test_v0_output_processor.py::test_ids_outside_the_vocabulary_have_no_text",
    "vllm#29355": "test_v0_engine.py::test_names_are_free_again_at_once",
    "vllm#8393": "test_v0_async_engine.py::test_field_vllm8393_two_requests_under_one_name "
                 "test_v0_scheduler.py::test_an_id_in_use_is_refused",
    "vllm#42474": "test_bad_input.py::test_a_huge_max_tokens_is_clamped_for_generate_and_chat",
    "vllm#40689": "test_llm.py::test_field_vllm40689_the_template_is_counted",

    "vllm#21987": "test_v0_output_processor.py::test_nothing_ends_below_min_tokens",
    "vllm#26317": "test_v0_output_processor.py::test_nothing_ends_below_min_tokens "
                  "test_llm.py::test_eos_min_tokens_and_ignore_eos",
    "vllm#5849": "test_v0_sampler.py::test_v073_1_13_min_tokens_masks_exactly_the_stop_ids",
    "vllm#32163": "test_v0_sampler.py::test_v073_1_13_min_tokens_masks_exactly_the_stop_ids",
    "vllm#984": "test_tokenizer.py::test_output_after_a_prompt",   # the same detokenizer in both
    "vllm#21951": "test_v0_output_processor.py::test_field_vllm48567_an_error_ends_its_own_request_only",

    "nano-vllm#249": "test_v0_sampler.py::test_greedy_rows_draw_no_numbers",
    "vllm#6719": "test_v0_sampler.py::test_greedy_rows_draw_no_numbers",
    "vllm#22180": "test_v0_sampler.py::test_v073_1_13_all_greedy_is_argmax",
    "vllm-project/vllm-metal#646":
        "test_v0_sampler.py::test_field_sendnn_542_a_greedy_row_beside_top_k_and_a_top_k_past_the_vocabulary",
    "vllm#5639": "test_v0_sampler.py::test_field_vllm_5639_rows_do_not_depend_on_their_company",
    "vllm#57719": "test_v0_sampler.py::test_penalties_equal_a_loop",
    "vllm-project/vllm-metal#69":
        "test_v0_sampler.py::test_field_vllm_1424_prompt_tokens_count_in_the_repetition_penalty_only",
    "EleutherAI/lm-evaluation-harness#3154":
        "test_llm.py::test_field_lm_eval3154_defaults_come_from_the_model",   # the front door is one for both
    "vllm#17929": "test_v0_sampler.py::test_v073_1_13_seeded_twice_is_equal_and_the_global_generator_is_left_alone "
                  "test_v0_model_runner.py::"
                  "test_field_vllm_17929_the_engines_seed_decides_and_the_global_generator_is_left_alone",
    "vllm#9453": "test_v0_sampler.py::test_v073_3_logprobs_are_of_the_processed_distribution "
                 "test_llm.py::test_v0_reports_processed_logprobs_and_v1_raw_ones",
    "vllm#15420": "test_v0_model_runner.py::test_field_vllm_15420_prompt_logprobs_over_chunks",
    "vllm#44319": "test_v0_sampler.py::test_field_vllm_44319_entries_are_by_id_and_k_or_k_plus_1",
    "vllm#5334": "test_tokenizer.py::test_decode_token_is_its_own_piece",   # one function for both
    "nano-vllm#260": "test_v0_sampler.py::test_field_nano_vllm_260_the_token_that_crosses_p_is_kept",

    "vllm#5898": "test_llm.py::test_alone_and_together_are_equal test_equality.py::test_v0_smollm2_equals_transformers",
}

# Rows of sections 1 to 8 that V0 cannot meet here, and why.
NOT_V0 = {
    "vllm#28558": "V0 has no draft tokens here",
    "vllm#25890": "V0 takes no images here",
    "vllm#20261": "V0 takes no images here; in 0.7.3 they switched its prefix cache off",
    "vllm#36708": "V0 takes no images here; in 0.7.3 they switched its prefix cache off",
}

LATER = {
    "vllm#42125": "LoRA: adapters are not built; with them, a reload must change the id or empty the cache",
    "vllm#11996": "tensor parallelism: there is one worker, and it lives in the engine's process, whose end is seen",
}


# The table itself ---------------------------------------------------------------

ALL = [row for rows in SECTIONS.values() for row in rows]


def prefix_of(row: str) -> str:
    "How the tests of a row begin: without its owner, in small letters."
    return "test_" + re.sub(r"[^a-z0-9]+", "_", row.split("/")[-1].lower()).strip("_") + "_"


@functools.cache
def names_in(file: str) -> list[str]:
    "Names of the test functions of a file, found without importing it."
    tree = ast.parse((TESTS / file).read_text())
    return [node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]


def runs_on_v0(function) -> bool:
    "By its name, or because it runs on both."
    both = {"llm", "toy", "engine"}
    return "_v0_" in function.name or any(arg.arg in both for arg in function.args.args)


V0_TESTS = [node.name for node in ast.parse(Path(__file__).read_text()).body
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_") and runs_on_v0(node)]


def is_tested_here(row): return any(name.startswith(prefix_of(row)) for name in names_in(Path(__file__).name))


def test_table_prefixes_tell_rows_apart():
    assert prefix_of("nano-vllm#144 (part 1)") == "test_nano_vllm_144_part_1_"
    assert prefix_of("vllm-project/vllm-metal#200") == "test_vllm_metal_200_"
    assert len(set(map(prefix_of, ALL))) == len(ALL) == 128


def test_table_every_row_is_tested_or_waits():
    assert [row for row in ALL if not (is_tested_here(row) or row in ROWS or row in LATER)] == [], "no test, no reason"
    assert [row for row in LATER if is_tested_here(row) or row in ROWS] == [], "these wait no longer"
    assert all(LATER.values())


def test_table_every_row_of_sections_1_to_8_is_tested_on_v0():
    rows = [row for section in (1, 3, 4, 5, 6, 7, 8) for row in SECTIONS[section]]   # the second is V0's own
    tested = [row for row in rows if row in V0_ROWS or any(name.startswith(prefix_of(row)) for name in V0_TESTS)]
    assert [row for row in rows if row not in tested and row not in NOT_V0 and row not in LATER] == [], "not on V0, no reason"
    assert [row for row in NOT_V0 if row in tested] == [], "these are tested"
    assert [row for row in (*V0_ROWS, *NOT_V0) if row not in rows] == []


def test_table_tests_elsewhere_exist():
    listed = [test.split("::") for tests in (*ROWS.values(), *V0_ROWS.values()) for test in tests.split()]
    assert [test for test in listed if test[1] not in names_in(test[0])] == []
    assert Path(__file__).name not in {file for file, _ in listed}


def test_table_no_row_is_made_up():
    assert [row for row in (*ROWS, *LATER) if row not in ALL] == []
    prefixes = ("test_table_", *map(prefix_of, ALL))
    assert [name for name in names_in(Path(__file__).name) if not name.startswith(prefixes)] == []


def test_table_has_every_row_of_the_reports():
    path = TESTS.parents[1] / "shared" / "field" / "bug_reports.md"
    if not path.is_file(): pytest.skip("the reports are not here")
    found, section = {}, None
    for line in path.read_text().splitlines():
        if heading := re.match(r"## (\d+)\.", line): section = int(heading[1])
        first = re.match(r"\| ([^,|]*?\S+#\d+(?: \(part \d\))?)", line)
        if first and section in SECTIONS: found.setdefault(section, []).append(first[1])
    assert found == SECTIONS


# Helpers ------------------------------------------------------------------------

def greedy(max_tokens=8, **kw): return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, **kw)


def toy_engine(executor=ToyExecutor, eos=(257,), log_stats=False, **config) -> LLMEngineV1:
    "An engine without a model; its next token is the last one plus one."
    config = make_config(**config)
    config.model_config.generation_config = {"eos_token_id": list(eos)}
    return LLMEngineV1(config, executor, log_stats, ByteTokenizer())


def says(tokens: list[int]) -> type:
    "An executor whose model answers every prompt with `tokens`."
    class Says(ToyExecutor):
        def execute_model(self, order):
            result = super().execute_model(order)
            for new in order.scheduled_new_reqs: self.start = len(new.prompt_token_ids)
            result.sampled_token_ids = [[tokens[len(self.tokens[i]) - self.start]] for i in result.req_ids]
            return result
    return Says


def finish(engine) -> dict:
    "The last output of every request."
    done = {}
    while engine.has_unfinished_requests():
        for out in engine.step(): done[out.request_id] = out
        if isinstance(engine, LLMEngineV1): core_of(engine).check_invariants()
    if isinstance(engine, LLMEngineV0): assert_at_rest(engine)
    return done


def core_of(engine): return engine.engine_core.engine_core


HELLO = [{"role": "user", "content": "hi"}]


def ask_server(kind, path, **fields):
    "Status and JSON of one request to a new server; of a stream, all chunks, and it has ended as it should."
    async def main():
        engine = ENGINES[kind]()
        try: return await ask(build_app(engine, ["tiny"]), "POST", path, json.dumps({"model": "tiny", **fields}).encode())
        finally: engine.shutdown()
    answer = asyncio.run(main())
    if not fields.get("stream") or answer.status != 200: return answer.status, answer.json()
    *events, done, rest = answer.body.decode().split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return answer.status, [json.loads(event.removeprefix("data: ")) for event in events]


def toy_v1(tokens=None, eos=(257,), **config) -> LLMEngineV1:
    "An engine without a model; it answers `tokens`, or the last one plus one."
    return toy_engine(says(tokens) if tokens else ToyExecutor, eos, **config)


def toy_v0(tokens=None, eos=(257,), **config) -> LLMEngineV0:
    "The same of the other kind."
    class Says(V0ToyExecutor):
        def _sample(self, params, data, done, index):
            if tokens is None: return super()._sample(params, data, done, index)
            n = data.get_output_len() + len(done)
            return tokens[n] if n < len(tokens) else 0   # a late end's step for nobody
    config = make_v0_config(**config)
    config.model_config.generation_config = {"eos_token_id": list(eos)}
    return LLMEngineV0(config, Says, tokenizer=ByteTokenizer())


def toy_v0_late(*args, **config) -> LLMEngineV0: return toy_v0(*args, use_async=True, **config)


on_both = pytest.mark.parametrize("toy", [toy_v1, toy_v0, toy_v0_late])


def assert_pool_is_whole(scheduler):
    scheduler.check_invariants()
    manager = scheduler.kv_cache_manager
    assert manager.num_free_blocks == manager.num_gpu_blocks == len(set(map(id, manager.pool.free_queue)))


def some_page_says(*words: str) -> bool:
    "Whether one paragraph of a notebook has all the words."
    cells = (cell for page in NOTEBOOKS.glob("*.ipynb") for cell in json.loads(page.read_text())["cells"])
    return any(all(word in line for word in words)
               for cell in cells if cell["cell_type"] == "markdown" for line in cell["source"])


@pytest.fixture(scope="module", params=["v1", "v0"])
def llm(request, tmp_path_factory):
    "A tiny model whose prompts are computed in chunks of at most 64 tokens, on each engine."
    return LLM(make_folder(tmp_path_factory.mktemp("tiny")), request.param, **ARGS, max_num_batched_tokens=64,
               enable_chunked_prefill=True, enable_prefix_caching=True)


# 1. Scheduler ----------------------------------------------------------------------

@pytest.mark.parametrize("seed", [0, 111, 196])   # the last two stall if a victim keeps its images
def test_vllm_45414_under_load_every_step_gets_somebody_further(seed):
    "Nothing runs, requests wait, the pool is empty, and so it stays for minutes."
    rng = random.Random(seed)
    scheduler = make_scheduler(num_blocks=12, block_size=4, budget=16, max_seqs=rng.choice([4, 6]), max_model_len=90,
                               prealloc=rng.choice([0, 4]), encoder_budget=12)
    requests = []
    for n in range(2000):
        if n < 150 and n % 3 == 0:   # about twice what can be served; every fifth may outgrow the pool of 48 tokens
            length = rng.randrange(5, 90 if n % 15 == 0 else 34)
            images = [(2, 6), (length - 10, rng.randrange(1, 9))] if length > 20 else []
            requests.append(make_request(f"r{n}", length - 1, max_tokens=rng.randrange(1, 14), images=images))
            scheduler.add_request(requests[-1])
        if n >= 150 and not scheduler.has_unfinished_requests(): break
        busy = scheduler.has_unfinished_requests()
        order, outputs = step(scheduler)
        assert not busy or order.num_scheduled_tokens or any(o.finished for o in outputs.values()), f"step {n} was for nothing"
    assert len(requests) == 50 and not scheduler.has_unfinished_requests()
    for request in requests:   # served in full, or told why not
        served = request.num_output_tokens == request.max_tokens
        assert served != bool(request.stop_reason), request.request_id
        assert served or "KV cache blocks, there are 12" in request.stop_reason
    assert any(r.stop_reason for r in requests) and scheduler.num_preempted > 0   # the test tests
    assert_pool_is_whole(scheduler)


@pytest.mark.parametrize("seed", range(6))
def test_vllm_45414_v0_under_load_every_step_gets_somebody_further(seed):
    rng = random.Random(seed)
    class Small(V0ToyExecutor): num_cpu_blocks = 8
    engine = make_v0_engine(
        executor=Small, num_blocks=12, max_model_len=40, budget=rng.choice([8, 16]), chunked=True, caching=rng.random() < 0.5,
        preemption_mode=rng.choice([None, "swap"]), use_async=rng.random() < 0.5, max_num_seqs=rng.choice([4, 6]))
    wanted, lengths, num_idle = {}, {}, 0
    for n in range(2000):
        if n < 150 and n % 3 == 0:
            length, params = rng.randrange(1, 41), SamplingParams(max_tokens=rng.randrange(1, 14), ignore_eos=True)
            engine.add_request(f"r{n}", [7] * length, params)
            wanted[f"r{n}"] = min(params.max_tokens, 41 - length)
        if n >= 150 and not engine.has_unfinished_requests(): break
        before = len(engine.executor.requests)
        for out in engine.step(): lengths[out.request_id] = len(out.outputs[0].token_ids)
        # V0 makes room in one step and uses it in the next; and an output may come late.
        num_idle = num_idle + 1 if len(engine.executor.requests) == before and engine.has_unfinished_requests() else 0
        assert num_idle <= 2, f"step {n}: nobody got further for {num_idle} steps"
    assert lengths == wanted and engine.scheduler.num_cumulative_preemption > 0   # the test tests
    assert_at_rest(engine)


@pytest.mark.parametrize("needy", range(5))
def test_vllm_49097_a_victim_costs_nobody_else_the_step(needy):
    "Someone is preempted, the list gets shorter, and the loop passes over a request that could have run."
    # Two blocks each, no block is left, and in one request both are full.
    scheduler = make_scheduler(num_blocks=10, block_size=4, prealloc=0, caching=False)
    requests = [make_request(str(i), 8 if i == needy else 6) for i in range(5)]
    for request in requests: scheduler.add_request(request)
    step(scheduler)
    order, outputs = step(scheduler)
    others = [str(i) for i in range(4)]
    assert counts(order) == dict.fromkeys(others, 1) and list(outputs) == others
    assert names(scheduler.running) == others and names(scheduler.waiting) == ["4"]


@pytest.mark.parametrize("policy, others", [("fcfs", "0123"), ("priority", "1234")])
@pytest.mark.parametrize("needy", range(5))
def test_vllm_49097_v0_a_victim_costs_nobody_else_the_step(policy, others, needy):
    # The first in the queue is the least urgent: by priority the victim stands before all others.
    scheduler = make_v0_scheduler(num_gpu=10, policy=policy)
    for i in range(5):
        scheduler.add_seq_group(make_v0_group(i, 8 if i == needy else 6, arrival=float(i), priority=9 * (i == 0)))
    v0_step(scheduler)
    assert chunks(v0_step(scheduler)[1]) == [(i, 1) for i in others]
    assert len(scheduler.waiting) == 1


def test_vllm_41951_the_victim_comes_back_first_and_finds_its_blocks():
    "A preempted request queues behind one with an earlier arrival time, and what it had computed is lost."
    scheduler = make_scheduler(num_blocks=3, max_seqs=2, prealloc=0)
    x, y, early = make_request("x", 16, max_tokens=3), make_request("y", 24, max_tokens=3), make_request("early", 5, max_tokens=1)
    x.arrival_time, y.arrival_time, early.arrival_time = 5.0, 9.0, 1.0
    for request in (x, y): scheduler.add_request(request)
    step(scheduler)
    scheduler.add_request(early)
    step(scheduler)                      # x needs a third block: y gives up two
    assert y.status is RequestStatus.PREEMPTED and names(scheduler.waiting) == ["y", "early"]
    step(scheduler)                      # the last token of x
    order, _ = step(scheduler)
    [resumed], [new] = order.scheduled_cached_reqs, order.scheduled_new_reqs
    assert (resumed.req_id, resumed.num_computed_tokens, new.req_id) == ("y", 16, "early")
    assert counts(order) == {"y": 9, "early": 5}


@pytest.mark.parametrize("policy, order", [("fcfs", ["y", "early"]), ("priority", ["early", "y"])])
def test_vllm_41951_v0_who_comes_back_first_is_the_policys_affair(policy, order):
    "First come: the victim stands at the head. By priority: among equals, the earlier arrival, as its page says."
    scheduler = make_v0_scheduler(num_gpu=5, policy=policy)
    for name, arrival in (("x", 5.0), ("y", 9.0)): scheduler.add_seq_group(make_v0_group(name, 8, arrival=arrival))
    v0_step(scheduler)
    scheduler.add_seq_group(make_v0_group("early", 8, arrival=1.0))
    v0_step(scheduler)                   # x needs a third block, the fifth; y has to go
    assert [group.request_id for group in scheduler.waiting] == order
    assert some_page_says("sorts by a number that the user gives", "then by time of arrival")


@pytest.mark.parametrize("settings", [dict(), dict(preemption_mode="swap"), dict(num_blocks=24), dict(num_steps=4)], ids=str)
def test_vllm_9342_v0_an_urgent_request_ends_nobody(settings):
    "Ten seats, fifteen requests, then one that is more urgent: the engine is gone."
    engine = make_v0_engine(max_num_seqs=10, policy="priority", **settings)
    for i in range(15): engine.add_request(str(i), [i] * 5, SamplingParams(max_tokens=12), arrival_time=float(i))
    for _ in range(2): engine.step()
    engine.add_request("urgent", [100, 101], SamplingParams(max_tokens=12), arrival_time=99.0, priority=-100)
    done = {o.request_id: o.outputs[0].token_ids for o in run(engine) if o.finished}
    assert done == {**{str(i): list(range(i + 1, i + 13)) for i in range(15)}, "urgent": list(range(102, 114))}
    assert list(done).index("urgent") < 11, "five were waiting before it came"
    assert engine.scheduler.num_cumulative_preemption > 0
    assert_at_rest(engine)


def test_vllm_metal_200_a_prompt_longer_than_a_step_does_not_wait_for_ever(llm):
    "Chunked prefill is off, the prompt is longer than the budget: it can never be scheduled."
    with pytest.raises(ValueError, match=r"max_num_batched_tokens \(2048\) .* max_model_len \(3000\)"):
        SchedulerConfig(max_num_batched_tokens=2048, max_model_len=3000, enable_chunked_prefill=False)
    assert SchedulerConfig(max_model_len=3000).max_num_batched_tokens == 3000   # by default it fits
    # V1 always cuts, V0 if it is asked to: three times the budget, and it comes to an end.
    assert llm.vllm_config.scheduler_config.max_num_batched_tokens == 64
    out, = llm.generate([[7] * 200], greedy(3), **quick)
    assert len(out.outputs[0].token_ids) == 3
    with pytest.raises(ValueError, match="enable_chunked_prefill=False"):
        LLM(llm.vllm_config.model_config.model, **ARGS, enable_chunked_prefill=False)


@pytest.mark.parametrize("length, budget", [(24, 16), (8, 64)])   # in chunks; all at once, several preempted in a step
def test_vllm_21809_preemptions_are_counted(length, budget):
    "Prompts that do not all fit preempt each other again and again, and no figure shows it."
    class Counts(ToyExecutor):
        num_resumed = 0
        def execute_model(self, order):
            self.num_resumed += sum(data.resumed_from_preemption for data in order.scheduled_cached_reqs)
            return super().execute_model(order)
    engine = toy_engine(Counts, log_stats=True, num_blocks=16, max_model_len=64, caching=False, budget=budget)
    for i in range(8): engine.add_request(f"r{i}", [i] * length, SamplingParams(max_tokens=12))
    by_scheduler = by_front_end = 0
    done = {}
    while engine.has_unfinished_requests():
        for out in engine.step(): done[out.request_id] = out.outputs[0].token_ids
        by_scheduler += engine.last_stats[0].num_preempted_reqs
        by_front_end += engine.last_stats[1].num_preempted_reqs
    assert by_scheduler == by_front_end == core_of(engine).executor.num_resumed > 0
    assert done == {f"r{i}": list(range(i + 1, i + 13)) for i in range(8)}


@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize("length, budget", [(24, 16), (8, 64)])
def test_vllm_21809_v0_a_prompt_starts_if_all_of_it_fits_and_preemptions_are_counted(length, budget, mode):
    class Counts(V0ToyExecutor):
        num_back, away = 0, frozenset()
        def execute_model(self, request):
            groups = request.seq_group_metadata_list
            self.num_back += sum(g.is_prompt and data.get_output_len() > 0 and not data.get_num_computed_tokens()
                                 for g in groups for data in g.seq_data.values())
            self.num_back += bool(request.blocks_to_swap_in) and len(self.away & {g.request_id for g in groups})
            return super().execute_model(request)
    engine = make_v0_engine(log_stats=True, executor=Counts, num_blocks=16, budget=budget, chunked=True, preemption_mode=mode)
    for i in range(8): engine.add_request(f"r{i}", [i] * length, SamplingParams(max_tokens=12))
    done = {}
    while engine.has_unfinished_requests():
        engine.executor.away = frozenset(g.request_id for g in engine.scheduler.swapped)
        before = engine.scheduler.num_cumulative_preemption
        for out in engine.step(): done[out.request_id] = out.outputs[0].token_ids
        if engine.scheduler.num_cumulative_preemption > before: assert any(done.values()), "a prompt was given up half-way"
        assert engine.last_stats.num_preemptions == engine.scheduler.num_cumulative_preemption
    assert engine.last_stats.num_preemptions == engine.executor.num_back > 0
    assert done == {f"r{i}": list(range(i + 1, i + 13)) for i in range(8)}


def test_vllm_53130_v0_groups_on_the_host_take_no_seats():
    "Running and parked requests together reach `max_num_seqs`, and nobody is ever admitted again."
    scheduler = make_v0_scheduler(num_gpu=5, num_cpu=8, max_seqs=2, chunked=True, preemption_mode="swap")
    for name in "ab": scheduler.add_seq_group(make_v0_group(name, 8, max_tokens=20))
    v0_step(scheduler)
    scheduler.add_seq_group(make_v0_group("c", 3, max_tokens=2))
    outputs = v0_step(scheduler)[1]      # a needs a third block: b goes to the host, and c comes in
    assert chunks(outputs) == [("c", 3), ("a", 1)] and [g.request_id for g in scheduler.swapped] == ["b"]
    for _ in range(60): v0_step(scheduler)
    assert not scheduler.has_unfinished_seqs()


@pytest.mark.parametrize("budget, cache", [(50, 80), (80, 50)])
def test_vllm_25890_media_that_never_fits_is_refused_and_what_fits_gets_through(budget, cache):
    "One huge picture: the engine makes empty steps for ever."
    scheduler = make_scheduler(budget=80, encoder_budget=budget, encoder_cache=cache, max_model_len=300)
    with pytest.raises(ValueError, match="image of 51 tokens, the encoder takes at most 50"):
        scheduler.add_request(make_request("huge", 223, images=[(10, 51)]))
    scheduler.add_request(make_request("large", 223, images=[(10, 50), (100, 50), (150, 50)], max_tokens=2))
    for _ in range(20):
        if not scheduler.has_unfinished_requests(): break
        assert step(scheduler)[0].num_scheduled_tokens
    assert not scheduler.has_unfinished_requests()
    assert_pool_is_whole(scheduler)


# 2. Several answers, and swapping -----------------------------------------------------

def test_vllm_14326_leaving_a_stream_of_two_answers_ends_both(llm):
    "The client goes, the log says so, and both answers are computed to their end."
    params = SamplingParams(n=2, ignore_eos=True, max_tokens=150)
    stream = llm.stream("abc", params)
    for _ in range(3): next(stream)
    stream.close()
    llm.generate("next", greedy(1), **quick)
    assert not llm.llm_engine.has_unfinished_requests()
    if llm.engine_name == "v0": assert_at_rest(llm.llm_engine)
    else: assert_pool_is_whole(core_of(llm.llm_engine).scheduler)


def test_vllm_11898_answers_with_a_seed_differ_and_each_streams_to_its_end(llm):
    "Three answers with one seed are the same text three times, and all streams stop with the first."
    def params(n=1, **kw): return SamplingParams(n=n, temperature=1, max_tokens=12, stop_token_ids=list(range(0, 250, 9)), ignore_eos=True, **kw)
    together, = llm.generate("abc", params(3, seed=7), **quick)
    alone = [llm.generate("abc", params(seed=seed), **quick)[0].outputs[0] for seed in (7, 8, 9)]
    assert [c.token_ids for c in together.outputs] == [c.token_ids for c in alone]
    assert len({tuple(c.token_ids) for c in alone}) == 3
    assert len({len(c.token_ids) for c in alone}) > 1, "the test tests: they end at different times"
    streamed = {i: [] for i in range(3)}
    for out in llm.stream("abc", params(3, seed=7, output_kind=RequestOutputKind.DELTA)):
        for c in out.outputs: streamed[c.index] += c.token_ids
    assert list(streamed.values()) == [c.token_ids for c in alone]


def test_vllm_190_pages_say_in_which_order_a_group_is_swapped():
    "Readers see the status change before the copy, and take it for a mistake."
    assert some_page_says("marks the sequences as swapped at once, and only then", "before the next forward pass")


# 3. Blocks ---------------------------------------------------------------------------

@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_vllm_37076_v0_nan_in_free_blocks_never_reaches_an_output(tmp_path, mode):
    folder = make_folder(tmp_path / "tiny")
    def start(num_blocks):
        args = ARGS | dict(num_gpu_blocks_override=num_blocks, max_model_len=128, block_size=4, swap_space=0.001)
        return LLM(folder, "v0", **args, preemption_mode=mode)
    roomy, tight = start(512), start(40)
    prompts = [[(7 * i + j) % 250 for j in range(9 + 11 * i)] for i in range(8)]
    wanted = [out.outputs[0].token_ids for out in roomy.generate(prompts, greedy(20), **quick)]
    engine, step = tight.llm_engine, tight.llm_engine.step
    pools = engine.executor.driver_worker.cache_engine.gpu_cache
    def poisoned():
        outputs = step()
        free = list(engine.scheduler.block_manager.block_allocator.allocators[Device.GPU]._free_block_ids)
        for pool in pools: pool[:, free] = float("nan")
        return outputs
    engine.step = poisoned
    for _ in range(2): assert [out.outputs[0].token_ids for out in tight.generate(prompts, greedy(20), **quick)] == wanted
    assert engine.scheduler.num_cumulative_preemption > 0 == engine.scheduler.num_swap_fallbacks


@pytest.mark.parametrize("max_tokens", [4, 5, 50])
@pytest.mark.parametrize("late", [False, True])
def test_sglang_jax_982_v0_two_ways_to_end_free_once(max_tokens, late):
    "Stop string, length and abort; and with late outputs a step that turns out to be unnecessary."
    engine = toy_v0(num_blocks=16, use_async=late)
    engine.add_request("r", "a", SamplingParams(max_tokens=max_tokens, stop=["de"]))
    engine.add_request("other", "k", SamplingParams(max_tokens=30))
    answer = None
    while answer is None:
        for out in engine.step():
            if out.request_id == "r" and out.finished: answer = out.outputs[0]
    assert (answer.text, answer.stop_reason, len(answer.token_ids)) == ("bc", "de", 4)
    for _ in range(2): engine.abort_request(["r", "never heard of"])
    assert finish(engine)["other"].outputs[0].token_ids == list(range(108, 138))


@pytest.mark.parametrize("max_tokens", [4, 5, 50])
def test_sglang_jax_982_two_ways_to_end_free_once(max_tokens):
    "The end of the output and the loop beside it both free the last slot."
    # After "a", "de" is complete with the fourth token. The core ends there too, one step later, or not at all.
    engine = toy_engine(num_blocks=16)
    engine.add_request("r", "a", SamplingParams(max_tokens=max_tokens, stop=["de"]))
    engine.add_request("other", "k", SamplingParams(max_tokens=30))
    core_id, = (i for i in core_of(engine).scheduler.requests if i.startswith("r"))
    answer = None
    while answer is None:
        for out in engine.step():
            if out.request_id == "r" and out.finished: answer = out.outputs[0]
    assert (answer.text, answer.stop_reason, len(answer.token_ids)) == ("bc", "de", 4)
    assert core_id not in core_of(engine).scheduler.requests
    for _ in range(2):
        engine.abort_request("r")
        engine.engine_core.abort_requests([core_id, "never heard of"])
        core_of(engine).check_invariants()
    assert finish(engine)["other"].outputs[0].token_ids == list(range(108, 138))
    assert_pool_is_whole(core_of(engine).scheduler)


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("num_blocks", [64, 14])
def test_sglang_36855_what_is_not_read_from_the_cache_is_computed_once(caching, num_blocks):
    "A request that may not use the cache forgets each chunk it has computed, and starts again."
    rng = random.Random(1)
    prompts = {name: random_prompt(rng, 40, 41) for name in "ab"}
    engine = Engine(budget=8, num_blocks=num_blocks, caching=caching, max_model_len=56)
    for name, prompt in prompts.items(): engine.add(name, prompt, greedy(6, prompt_logprobs=0))
    tokens = engine.run(max_steps=60)
    assert tokens == {name: alone(prompt, params=greedy(6)) for name, prompt in prompts.items()}
    for name in prompts: assert sum(o.new_prompt_logprobs is not None for o in engine.outputs[name]) == 1
    num_computed = sum(order.total_num_scheduled_tokens for order in engine.orders)
    if num_blocks == 64: assert num_computed == 2 * (40 + 5) and not engine.scheduler.num_preempted
    else: assert 1 <= engine.scheduler.num_preempted <= 2   # and not again and again


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("num_blocks", [64, 14])
def test_sglang_36855_v0_what_is_not_read_from_the_cache_is_computed_once(caching, num_blocks):
    class Counts(V0ToyExecutor):
        num_computed = 0
        def execute_model(self, request):
            self.num_computed += sum(g.token_chunk_size for g in request.seq_group_metadata_list)
            return super().execute_model(request)
    engine = make_v0_engine(executor=Counts, num_blocks=num_blocks, max_model_len=56, budget=8, chunked=True, caching=caching)
    for i in range(2): engine.add_request(str(i), [i] * 40, SamplingParams(max_tokens=6, prompt_logprobs=0))
    done = {o.request_id: o for o in run(engine, max_steps=60) if o.finished}
    assert {i: (len(o.prompt_logprobs), o.outputs[0].token_ids) for i, o in done.items()} == {
        str(i): (40, list(range(i + 1, i + 7))) for i in range(2)}
    if num_blocks == 64: assert engine.executor.num_computed == 2 * (40 + 5) and not engine.scheduler.num_cumulative_preemption
    else: assert engine.scheduler.num_cumulative_preemption <= 2   # and not again and again
    assert_at_rest(engine)


def test_sglang_508_v0_a_shared_start_holds_no_more_than_itself():
    "Two prompts share a block; of each rest, the whole can be overwritten once its request has ended."
    scheduler = make_v0_scheduler(num_gpu=6, caching=True)
    prompts = {"AB": [1, 2, 3, 4, 5, 5, 5, 5], "AC": [1, 2, 3, 4, 6, 6, 6, 6]}
    for name, prompt in prompts.items(): scheduler.add_seq_group(make_v0_group(name, prompt, max_tokens=1))
    for name in prompts: v0_step(scheduler)
    assert scheduler.block_manager.get_num_free_gpu_blocks() == 6
    scheduler.add_seq_group(make_v0_group("AB again", prompts["AB"], max_tokens=9))
    v0_step(scheduler)
    assert scheduler.block_manager.get_num_free_gpu_blocks() == 4   # A and B are held; C is free with the rest
    scheduler.add_seq_group(make_v0_group("big", [9] * 12, max_tokens=1))
    assert chunks(v0_step(scheduler)[1]) == [("big", 12)]
    scheduler.check_invariants()


def test_mini_sglang_142_a_table_never_changes_under_its_request():
    "Pages of an unfinished request are freed as duplicates of cached ones; its table still names them."
    rng = random.Random(2)
    prompt = random_prompt(rng, 38, 39)
    engine = Engine(budget=16, num_blocks=48, nan_in_free_blocks=True)
    engine.add("first", prompt, max_tokens=2)
    for _ in range(2): engine.step()
    # It computes the same blocks again, in chunks, while the first one ends and others come.
    engine.add("same", prompt, greedy(30, prompt_logprobs=0))
    wanted = {"first": alone(prompt, max_tokens=2), "same": alone(prompt, max_tokens=30)}
    table, manager = [], engine.scheduler.kv_cache_manager
    for n in range(40):
        if n % 5 == 3:
            others = {f"hit{n}": prompt[:30] + [n], f"miss{n}": random_prompt(rng, 20, 30)}
            for name, other in others.items():
                engine.add(name, other, max_tokens=3)
                wanted[name] = alone(other, max_tokens=3)
        engine.step()
        now = [b.block_id for b in manager.req_to_blocks.get("same", ())]
        if not now and table: break
        assert now[:len(table)] == table, f"step {n}: a block was taken away"
        table = now
    assert len(table) == 17 and not engine.scheduler.num_preempted
    assert engine.run() == wanted


# 4. Prefix cache -----------------------------------------------------------------------

@pytest.mark.parametrize("length", [16, 32, 64, 128])
def test_nano_vllm_199_the_same_aligned_prompt_twice(llm, length):
    "Found to its last token, a prompt leaves nothing to compute, and attention fails."
    llm.reset_prefix_cache()
    prompt = [[(5 * i) % 240 for i in range(length)]]
    first, again = (llm.generate(prompt, greedy(), **quick)[0] for _ in range(2))
    assert first.num_cached_tokens == 0 and length - 16 <= again.num_cached_tokens < length
    assert first.outputs[0].token_ids == again.outputs[0].token_ids


def test_vllm_23399_prompt_logprobs_do_not_read_the_cache_and_a_page_says_so(llm):
    "The guide says one thing about prompt logprobs and prefix caching, the engine does another."
    prompt, scoring = [[(7 * i) % 200 for i in range(100)]], greedy(2, prompt_logprobs=0)
    for params, num_cached in ((greedy(2), 0), (scoring, 0), (greedy(2), 96), (scoring, 0)):
        assert llm.generate(prompt, params, **quick)[0].num_cached_tokens == num_cached
    assert some_page_says("prompt_logprobs", "does not read the cache")


def test_vllm_42245_scores_do_not_depend_on_who_came_before():
    "Prompts overlap; where one was found in the cache, its scores are what the buffer happened to hold."
    rng = random.Random(3)
    start = random_prompt(rng, 24, 25)
    prompts = {"a": start + [1, 2, 3], "b": start + [1, 9], "c": start[:17]}
    def scores_of(order, **config):
        engine = Engine(**config)
        engine.add("warm", start, max_tokens=3)          # fills the cache
        for name in order:
            engine.add(name, prompts[name], greedy(2, prompt_logprobs=2))
            engine.step()
        engine.run()
        return {name: next(o.new_prompt_logprobs for o in engine.outputs[name] if o.new_prompt_logprobs) for name in order}
    wanted = {name: scores_of(name, caching=False, budget=64)[name] for name in prompts}
    for order in itertools.permutations("abc"):
        found = scores_of(order, budget=20)
        for name, prompt in prompts.items():
            assert [ids[0] for ids in found[name].logprob_token_ids] == prompt[1:]
            torch.testing.assert_close(torch.tensor(found[name].logprobs), torch.tensor(wanted[name].logprobs), atol=1e-4, rtol=0)


def test_vllm_42245_scores_of_either_engine_do_not_depend_on_who_came_before(llm):
    start = [(3 * i) % 200 for i in range(48)]
    prompts = {"a": start + [1, 2, 3], "b": start + [1, 9], "c": start[:33]}
    def scores_of(order):
        llm.reset_prefix_cache()
        llm.generate([start], greedy(3), **quick)   # fills the cache
        outputs = llm.generate([prompts[name] for name in order], greedy(2, prompt_logprobs=2), **quick)
        return {name: out.prompt_logprobs for name, out in zip(order, outputs)}
    wanted = {name: scores_of(name)[name] for name in prompts}
    for order in itertools.permutations("abc"):
        for name, found in scores_of(order).items():
            assert found[0] is None and len(found) == len(prompts[name])
            for token, here, there in zip(prompts[name][1:], found[1:], wanted[name][1:]):
                assert token in here and here[token].logprob == pytest.approx(there[token].logprob, abs=1e-4)


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_vllm_5344_scoring_a_long_prompt_twice_harms_nobody(llm, max_tokens):
    "`echo` with `logprobs` on a long prompt, sent twice with prefix caching: the engine is gone."
    prompt, params = [[(11 * i + 5) % 250 for i in range(200)]], greedy(max_tokens, logprobs=1, prompt_logprobs=1)
    running = llm.stream("somebody else", greedy(40))
    next(running)
    first, second = (llm.generate(prompt, params, **quick)[0] for _ in range(2))
    assert len(list(running)[-1].outputs[0].token_ids) == 40
    assert len(first.prompt_logprobs) == len(second.prompt_logprobs) == 200 and first.prompt_logprobs[0] is None
    for i, token in enumerate(prompt[0][1:], 1):
        one, two = (out.prompt_logprobs[i][token] for out in (first, second))
        assert one.logprob == pytest.approx(two.logprob, abs=1e-4)
        assert one.decoded_token == two.decoded_token == ByteTokenizer().decode(token)
    assert first.outputs[0].token_ids == second.outputs[0].token_ids and len(first.outputs[0].token_ids) == max_tokens


@pytest.mark.parametrize("engine", ["v1", "v0"])
def test_vllm_57610_an_edit_at_the_end_still_hits_with_a_sliding_window(tmp_path, engine):
    "With a window, a prompt that differs in its last tokens finds nothing in the cache."
    folder = make_folder(tmp_path / "window", architectures=["MistralForCausalLM"], model_type="mistral", sliding_window=24)
    cached, plain = (LLM(folder, engine, **ARGS, enable_prefix_caching=caching) for caching in (True, False))
    chat = [(13 * i) % 250 for i in range(100)]
    for prompt, num_cached in ((chat, 0), (chat[:98] + [1, 2], 96), (chat[:90] + [3] * 10, 80), (chat + [4], 96)):
        out, wanted = (llm.generate([prompt], greedy(), **quick)[0] for llm in (cached, plain))
        assert (out.num_cached_tokens, out.outputs[0].token_ids) == (num_cached, wanted.outputs[0].token_ids)


# 5. Bad input ----------------------------------------------------------------------------

@pytest.mark.parametrize("engine", ["v1", "v0"])
def test_vllm_54195_a_bad_word_past_the_logits_leaves_its_neighbours_alone(tmp_path, engine):
    "A token id that has no logit ends the step, or lands in the row of somebody else."
    # The tokenizer has 261 tokens, the model 258 logits.
    llm = LLM(make_folder(tmp_path / "narrow", vocab_size=258), engine, **ARGS)
    wanted = [out.outputs[0].token_ids for out in llm.generate(["one", "two"], greedy(), **quick)]
    params = [greedy(bad_words=["<|user|>"]), greedy()]
    assert [out.outputs[0].token_ids for out in llm.generate(["one", "two"], params, **quick)] == wanted
    running = llm.stream("two", greedy())
    next(running)
    with pytest.raises(ValueError, match=r"bad_words_token_ids\[0\]\[1\] is 258, .* from 0 to 257"):
        llm.generate("one", greedy(bad_words_token_ids=[[97, 258]]), **quick)
    assert list(running)[-1].outputs[0].token_ids == wanted[1]


@pytest.mark.parametrize("engine", ["v1", "v0"])
@pytest.mark.parametrize("vocab_size, allowed, refused", [(258, 257, 258), (300, 299, 300)])
def test_vllm_ascend_15228_ids_are_checked_against_the_logits(tmp_path, engine, vocab_size, allowed, refused):
    "The tokenizer has 261 tokens, the model fewer logits, or more."
    llm = LLM(make_folder(tmp_path / "tiny", vocab_size=vocab_size), engine, **ARGS)
    out, = llm.generate("one", greedy(3, allowed_token_ids=[allowed]), **quick)
    assert out.outputs[0].token_ids == [allowed] * 3
    for field in ("allowed_token_ids", "stop_token_ids"):
        with pytest.raises(ValueError, match=rf"{field}\[0\] is {refused}, .* from 0 to {vocab_size - 1}"):
            llm.generate("one", greedy(**{field: [refused]}), **quick)


@pytest.mark.parametrize("kind", ENGINES)
@pytest.mark.parametrize("limits, num_tokens", [
    ({"max_completion_tokens": 5}, 5), ({"max_completion_tokens": 5, "max_tokens": None}, 5),
    ({"max_completion_tokens": 5, "max_tokens": 5}, 5), ({"max_tokens": 7}, 7), ({"max_completion_tokens": None}, None),
    ({}, None)])
def test_vllm_19861_v0_and_v1_max_completion_tokens_is_a_limit(kind, limits, num_tokens):
    "The newer name alone, and the answer is as long as it likes. Null is the rest of the window."
    status, answer = ask_server(kind, "/v1/chat/completions", messages=HELLO, **limits)
    usage = answer["usage"]
    assert status == 200 and answer["choices"][0]["finish_reason"] == "length"
    assert usage["completion_tokens"] == (num_tokens or 64 - usage["prompt_tokens"])   # the toy's window has 64 tokens


# 6. Text, stop strings, ends -----------------------------------------------------------------

@on_both
@pytest.mark.parametrize("kind", list(RequestOutputKind)[:2])
@pytest.mark.parametrize("stop, include, text", [
    (["DEFGHIJ"], False, "ABC"), (["DEFGHIJ"], True, "ABCDEFGHIJ"), (["XYZ", "EFG"], False, "ABCD"), (["DEFX"], False, "ABCDEFGHIJKL")])
def test_vllm_3574_streams_never_leak_a_stop_string(toy, kind, stop, include, text):
    "A stop string of seven tokens: its first pieces are shown before it is complete."
    engine = toy()
    engine.add_request("r", "@", SamplingParams(
        max_tokens=12, stop=stop, include_stop_str_in_output=include, output_kind=kind))
    seen = ""
    while engine.has_unfinished_requests():
        for out in engine.step():
            piece = out.outputs[0].text
            seen = seen + piece if kind is RequestOutputKind.DELTA else piece
            assert text.startswith(seen), f"{seen!r} was shown"
    assert seen == text


@on_both
def test_vllm_2577_a_stream_ends_where_the_whole_answer_ends(toy):
    "With streaming, a long stop string is not found."
    answers = set()
    for kind in RequestOutputKind:
        engine = toy(list(b"Thought: look\nObservation: nothing"))
        engine.add_request("r", "Q", SamplingParams(max_tokens=34, stop=["\nObservation"], output_kind=kind))
        seen = []
        while engine.has_unfinished_requests(): seen += [out.outputs[0] for out in engine.step()]
        text = "".join(c.text for c in seen) if kind is RequestOutputKind.DELTA else seen[-1].text
        answers.add((text, seen[-1].finish_reason, seen[-1].stop_reason))
    assert answers == {("Thought: look", "stop", "\nObservation")}


@on_both
@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("include", [True, False])
def test_vllm_3672_a_special_stop_token_cuts_no_text_before_it(toy, skip, include):
    "The stop token is special and is not shown; the text loses as many characters as if it had been."
    engine = toy([*b"hello", SPECIAL, *b"never"])
    engine.add_request("r", "Q", SamplingParams(
        max_tokens=9, stop_token_ids=[SPECIAL], skip_special_tokens=skip, include_stop_str_in_output=include))
    answer = finish(engine)["r"].outputs[0]
    # Asked to show special tokens, V0 cuts a stop token's text as it cuts a stop string's.
    shown = not skip and (include or toy is toy_v1)
    assert (answer.text, answer.token_ids) == ("hello" + "<|system|>" * shown, [*b"hello", SPECIAL])
    assert (answer.finish_reason, answer.stop_reason) == ("stop", SPECIAL)


@on_both
@pytest.mark.parametrize("params, num_tokens, reason", [
    ({}, 2, SPECIAL), (dict(ignore_eos=True), 8, None), (dict(ignore_eos=True, stop_token_ids=[259]), 4, 259),
    (dict(stop_token_ids=[65]), 1, 65), (dict(min_tokens=5), 6, None)])
def test_vllm_4589_ignore_eos_ignores_every_end_of_the_model_and_no_other(toy, params, num_tokens, reason):
    "The config lists several end tokens; with `ignore_eos`, all but the first still end the output."
    engine = toy([65, SPECIAL, 66, 259, 67, 257, 68, 69], eos=(257, SPECIAL, 259))
    engine.add_request("r", "Q", SamplingParams(max_tokens=8, **params))
    answer = finish(engine)["r"].outputs[0]
    assert (len(answer.token_ids), answer.stop_reason) == (num_tokens, reason)
    assert answer.finish_reason == ("length" if num_tokens == 8 else "stop")


@on_both
@pytest.mark.parametrize("wishes, num_tokens", [
    (dict(stop=["<|system|>"]), 8), (dict(stop=["<|system|>"], skip_special_tokens=False), 3), (dict(stop_token_ids=[SPECIAL]), 3)])
def test_vllm_792_special_tokens_stop_by_id_not_by_string(toy, wishes, num_tokens):
    "A special token as a stop string is never found, because its text is not there."
    engine = toy([65, 66, SPECIAL, 67, 68, 69, 70, 71])
    engine.add_request("r", "Q", SamplingParams(max_tokens=8, **wishes))
    assert len(finish(engine)["r"].outputs[0].token_ids) == num_tokens


@on_both
def test_vllm_mlx_109_no_half_characters_in_a_stream(toy):
    "A letter of two bytes, a picture of four: marks of replacement, one by one."
    text = "ď🎈é"
    for end in (len(text.encode()), len(text.encode()) - 1):   # the last one may be cut off by length
        engine = toy(list(text.encode()))
        engine.add_request("r", "Q", SamplingParams(max_tokens=end, output_kind=RequestOutputKind.DELTA))
        pieces = []
        while engine.has_unfinished_requests(): pieces += [out.outputs[0].text for out in engine.step()]
        assert "".join(pieces) == text.encode()[:end].decode(errors="replace")
        assert all("\ufffd" not in piece for piece in pieces[:-1])


@on_both
def test_vllm_4188_stop_strings_are_found_across_tokens_and_not_in_the_prompt(toy):
    "A base model does not stop at the words it was given."
    engine = toy(list(b" A: 4\nQuestion: 3+3"))
    engine.add_request("r", "Question: 2+2?", SamplingParams(max_tokens=19, stop=["Question:"]))
    answer = finish(engine)["r"].outputs[0]
    assert (answer.text, answer.stop_reason) == (" A: 4\n", "Question:")


# 8. Determinism ---------------------------------------------------------------------------------

@pytest.mark.parametrize("caching", [True, False])
def test_vllm_23138_equal_requests_side_by_side_give_equal_tokens(caching):
    "The same prompt many times at temperature 0, and the answers differ. In float32 they may not."
    prompt = random_prompt(random.Random(4), 33, 34)
    engine, wanted = Engine(budget=24, caching=caching, num_blocks=96), alone(prompt, max_tokens=20)
    for i in range(8):
        engine.add(str(i), prompt, max_tokens=20)
        if i % 3: engine.step()
    assert engine.run() == {str(i): wanted for i in range(8)}
    assert {len(order.num_scheduled_tokens) for order in engine.orders} >= {2, 5, 8}   # batches of many shapes
    assert some_page_says("bfloat16", "temperature 0", "rounding")   # where it is not promised


def test_vllm_23138_equal_requests_among_others_give_equal_tokens(llm):
    "Many times the same among others, some found in the cache and some not, in batches of many shapes."
    llm.reset_prefix_cache()
    prompt, others = [(9 * i) % 250 for i in range(45)], [[n] * (5 + 20 * n) for n in range(4)]
    wanted = llm.generate([prompt], greedy(20), **quick)[0].outputs[0].token_ids
    llm.reset_prefix_cache()
    batch = [prompt, others[0], prompt, others[1], prompt, prompt, others[2], prompt, others[3], prompt]
    params = [greedy(20) if p is prompt else greedy(3 + len(p) // 9) for p in batch]
    tokens = [out.outputs[0].token_ids for out in llm.generate(batch, params, **quick)]
    assert [t for t, p in zip(tokens, batch) if p is prompt] == [wanted] * 6


def test_vllm_7779_logprobs_under_load_are_those_of_a_request_alone(llm):
    "The same prompt, again and again while others run: its logprobs move."
    prompt, params = "is it always the same?", greedy(10, logprobs=3)
    llm.reset_prefix_cache()
    wanted = llm.generate(prompt, params, **quick)[0].outputs[0]
    crowd = ["x" * n for n in (5, 70, 33, 1, 90)]
    for _ in range(3):
        out = llm.generate([*crowd[:3], prompt, *crowd[3:]], [*[greedy(7)] * 3, params, *[greedy(12)] * 2], **quick)[3].outputs[0]
        assert out.token_ids == wanted.token_ids
        for here, there in zip(out.logprobs, wanted.logprobs):
            assert list(here) == list(there) and [p.rank for p in here.values()] == [p.rank for p in there.values()]
            assert [p.logprob for p in here.values()] == pytest.approx([p.logprob for p in there.values()], abs=1e-4)
        assert out.cumulative_logprob == pytest.approx(wanted.cumulative_logprob, abs=1e-3)


# 10. Streams, OpenAI's API --------------------------------------------------------------------------

BODIES = {"/v1/completions": {"prompt": "abc"}, "/v1/chat/completions": {"messages": HELLO}}
streams = pytest.mark.parametrize("path", BODIES)
on_both_servers = pytest.mark.parametrize("kind", ENGINES)


def stream(kind, path, **fields) -> list[dict]:
    status, chunks = ask_server(kind, path, **BODIES[path], stream=True, **fields)
    assert status == 200
    return chunks


@on_both_servers
@streams
def test_vllm_7262_the_usage_comes_once_and_the_rest_is_null(kind, path):
    "With `include_usage`, every chunk has it."
    *chunks, last = stream(kind, path, max_tokens=6, n=2, temperature=1, stream_options={"include_usage": True})
    assert len(chunks) > 6 and all(chunk["choices"] and chunk["usage"] is None for chunk in chunks)
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == 12
    for options in ({}, {"stream_options": {"include_usage": False}}):
        assert all("usage" not in chunk for chunk in stream(kind, path, max_tokens=6, **options))


@on_both_servers
@streams
@pytest.mark.parametrize("max_tokens", [1, 6])
def test_vllm_6371_the_usage_is_there_just_before_the_end(kind, path, max_tokens):
    "With `include_usage`, no chunk has it."
    chunks = stream(kind, path, max_tokens=max_tokens, stream_options={"include_usage": True})   # [DONE] came right after
    ends = [i for i, chunk in enumerate(chunks) if chunk["choices"] and chunk["choices"][0]["finish_reason"]]
    assert ends == [len(chunks) - 2] and chunks[-1]["usage"]["completion_tokens"] == max_tokens
    assert {chunk["id"] for chunk in chunks} == {chunks[-1]["id"]} and chunks[-1]["model"] == "tiny"


@on_both_servers
@streams
def test_vllm_6652_who_leaves_early_knows_what_it_has_cost(kind, path):
    "Bills are by the token, and the usage comes at the end, if one stays so long."
    chunks = stream(kind, path, max_tokens=9, logprobs=True if "chat" in path else 1,
                    stream_options={"continuous_usage_stats": True})
    seen = 0
    for chunk in chunks:
        for choice in chunk["choices"]:
            found = choice["logprobs"] or {}
            seen += len(found.get("tokens") or found.get("content") or ())
        assert chunk["usage"]["completion_tokens"] == seen
        assert chunk["usage"]["total_tokens"] == seen + chunk["usage"]["prompt_tokens"]
    assert seen == 9 and chunks[-1]["choices"]   # nobody asked for another one at the end


@pytest.mark.parametrize("make", [make_v1, lambda: AsyncLLMEngine(make_v0_engine(num_steps=4))], ids=["v1", "v0"])
def test_vllm_8625_tokens_are_counted_not_chunks(make):
    "A chunk carries several tokens, and is counted as one."
    async def main():
        engine = make()
        try:
            request = check_request(CompletionRequest, {
                "model": "tiny", "prompt": "abc", "max_tokens": 40, "stream": True, "logprobs": 0,
                "stream_options": {"include_usage": True, "continuous_usage_stats": True}})
            sizes, totals = [], []
            async for event in await Serving(engine, ["tiny"]).create_completion(request):
                await asyncio.sleep(0.03)   # a reader so slow that tokens gather; V0 makes four at a time
                if "[DONE]" in event: break
                chunk = json.loads(event.removeprefix("data: "))
                totals.append(chunk["usage"]["completion_tokens"])
                sizes += [len(c["logprobs"]["tokens"]) if c["logprobs"] else 0 for c in chunk["choices"]]
            return sizes, totals
        finally: engine.shutdown()
    sizes, totals = asyncio.run(asyncio.wait_for(main(), 20))
    assert sum(sizes) == totals[-1] == 40 and max(sizes) > 1
    assert totals[:len(sizes)] == list(itertools.accumulate(sizes))


@on_both_servers
@streams
def test_vllm_19662_every_choice_has_a_finish_reason_if_only_null(kind, path):
    "The key is missing until the last chunk."
    chunks = stream(kind, path, max_tokens=5, stream_options={"include_usage": True})
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["length"]


@on_both_servers
@streams
def test_vllm_35705_the_last_text_and_the_reason_come_apart(kind, path):
    "Both in one chunk, and clients that see the reason drop the text."
    chunks = stream(kind, path, max_tokens=10)
    texts = [c.get("text", c.get("delta", {}).get("content", "")) for chunk in chunks for c in chunk["choices"]]
    reasons = [c["finish_reason"] for chunk in chunks for c in chunk["choices"]]
    assert texts[-2] and (texts[-1], reasons) == ("", [None] * (len(reasons) - 1) + ["length"])
    assert len("".join(texts)) == 10
    if path.startswith("/v1/chat"): assert chunks[-1]["choices"][0]["delta"] == {}
    assert some_page_says("reason", "comes last and alone") and some_page_says("an empty delta with the reason")


@on_both_servers
@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("prompt, text", [([97, 108, 101], "ale"), ("ale", "ale"), ([195, 169, 97], "éa")])
@pytest.mark.parametrize("max_tokens", [5, 0])
def test_vllm_2706_echo_of_token_ids_and_of_a_prompt_alone(kind, is_stream, prompt, text, max_tokens):
    "`echo` with token ids as the prompt, or with `max_tokens=0`, is a failure of the server."
    status, answer = ask_server(kind, "/v1/completions", prompt=prompt, echo=True, max_tokens=max_tokens, stream=is_stream)
    choices = [c for chunk in (answer if is_stream else [answer]) for c in chunk["choices"]]
    last = text.encode()[-1]
    assert status == 200 and "".join(c["text"] for c in choices) == text + bytes(range(last + 1, last + 1 + max_tokens)).decode()
    assert choices[-1]["finish_reason"] == "length"
