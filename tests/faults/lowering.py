"""Faults of `tests.mutants`: where and how programs are lowered."""

from __future__ import annotations

from tests.faults.kernels import of

RULES = "tests/transforms/test_promotion.py -k {}"

MUTANTS = [
    *of(
        "jax_flash2/_operation.py",
        (
            "kernels for gradients that nobody asks for",
            "if not asked.get(name, True))",
            "if name not in asked and asked.get(name))",
            "tests/transforms/test_derivatives.py -k nobody_asks",
        ),
    ),
    *of(
        "jax_flash2/_derivatives.py",
        (
            "second derivatives along what was asked for alone",
            "return problem.asking({}), along",
            "return problem, along",
            "tests/transforms/test_derivatives.py -k _vjp_of_grad_by_some",
        ),
    ),
    *of(
        "pallas_kernels/core/promotion.py",
        (
            "the caller's rules of promotion hold in lists of blocks",
            'with rank("allow"), dtype("standard"):',
            "with contextlib.nullcontext():",
            RULES.format("block_mask"),
        ),
        (
            "a float that is added, by the caller's rules",
            "return jnp.dtype(dtype if is_wider else jnp.float32)",
            "return jnp.promote_types(dtype, jnp.float32)",
            RULES.format("score_mod"),
        ),
    ),
    *of(
        "pallas_kernels/core/axes.py",
        (
            "products by a function that tools replace",
            "return dot_general_p.bind(",
            "return jax.lax.dot_general(",
            "tests/transforms/test_interception.py -k 'reach_no_product and xla'",
        ),
        (
            "a constant beside what differs between devices",
            "    a, b = varying_alike((a, b))\n",
            "",
            "tests/api/test_fp8.py -k meshes",
        ),
    ),
    *of(
        "jax_flash2/_operation.py",
        (
            "lowered for where arrays lie by default",
            "device.lowering_for(platform), _backends",
            "device.lowering_for(device.platform()), _backends",
            "tests/transforms/test_platforms.py -k arrays_of_a_cpu",
        ),
        (
            "run where arrays lie by default",
            "where = device.lowering_for(device.platform_of(arrays))",
            "where = device.lowering_for(device.platform())",
            "tests/transforms/test_platforms.py -k without_jit",
        ),
    ),
    *of(
        "jax_flash2/_backends.py",
        (
            "a named backend lowered for any platform",
            "if why_not_here is not None and is_named:",
            "if False:",
            "tests/transforms/test_platforms.py -k refused",
        ),
    ),
    *of(
        "jax_flash2/_sharding.py",
        (
            "constants of the whole in the partitioner's call",
            "custom_partitioning(jax.jit(function))",
            "custom_partitioning(function)",
            "tests/devices/test_partitioner.py -k compile_time",
        ),
    ),
    *of(
        "jax_flash2/_partitioner.py",
        (
            "mesh axes in reverse",
            "key=lambda j: -steps[j]",
            "key=lambda j: steps[j]",
            "tests/devices/test_sharding.py -k 'automatic and stay and 8-4 and xla'",
        ),
        (
            "one name for all programs",
            'f"{_kept.code()} {_devices(found)} {describe()}"',
            'f"{_kept.code()} {_devices(found)}"',
            "tests/devices/test_partitioner.py -k found_for_another",
        ),
        (
            "a name of this process",
            'f"{_kept.code()} {_devices(found)} {describe()}"',
            'f"{id(results)} {describe()}"',
            "tests/devices/test_partitioner.py -k found_again",
        ),
        (
            "a name for programs of all meshes",
            'f"{_kept.code()} {_devices(found)} {describe()}"',
            'f"{_kept.code()} {describe()}"',
            "tests/devices/test_partitioner.py -k other_meshes",
        ),
        (
            "parts lowered for each layer",
            "if key not in known.parts:",
            "if True:",
            "tests/devices/test_partitioner.py -k lowered_once",
        ),
        (
            "parts lowered as 64 bits are set by then",
            "with jax.enable_x64(known.x64):",
            "with jax.enable_x64(jax.config.jax_enable_x64):",
            "tests/devices/test_partitioner.py -k outside_of_x64",
        ),
    ),
    *of(
        "jax_flash2/_kept.py",
        (
            "kept under a name without the GPU",
            "yield device.target(), gpu",
            "yield device.target()",
            "tests/transforms/test_kept.py -k settings",
        ),
        (
            "kept under a name without settings",
            "yield jax.config.jax_enable_x64, ",
            "yield 0, ",
            "tests/transforms/test_kept.py -k settings",
        ),
        (
            "kept under a name without the user's tables",
            "[user_tables.read(x, gpu.kind) for x in tuned]",
            "len(tuned)",
            "tests/transforms/test_kept.py -k settings",
        ),
        (
            "kept under a name with every backend's tables",
            "[x for x in backends if x in user_tables.KNOWN]",
            "list(user_tables.KNOWN)",
            "tests/transforms/test_kept.py -k others_imported",
        ),
        (
            "kept under a name without the call's values",
            "*map(text, of_all), *map(text, values)",
            "*map(text, settings)",
            "tests/transforms/test_kept.py -k what_decides",
        ),
        (
            "sets in the order of their hashes",
            "sorted(map(text, x))",
            "map(text, x)",
            "tests/transforms/test_kept.py -k order_of_a_set",
        ),
        (
            "large arrays as NumPy prints them",
            "{x.tobytes().hex()}",
            "{x}",
            "tests/transforms/test_kept.py -k different_values",
        ),
        (
            "damaged files are read",
            "data[:size] == hashlib.sha256(data[size:]).digest() else",
            "data else",
            "tests/transforms/test_kept.py -k damaged",
        ),
        (
            "kept in a context that JAX writes into programs",
            'if any(getattr(x, "value", None) is not None for x in contexts):',
            "if False:",
            "tests/transforms/test_kept.py -k context",
        ),
        (
            "kept though the code has changed",
            "not _IMPORTED or _states() != _IMPORTED",
            "not _IMPORTED",
            "tests/transforms/test_kept.py -k changes_while",
        ),
        (
            "drafts stay where writing failed",
            "draft.unlink(missing_ok=True)",
            "pass",
            "tests/transforms/test_kept.py -k nothing_else",
        ),
        (
            "exports are kept",
            "if module.lowering_parameters.for_export:",
            "if False:",
            "tests/transforms/test_kept.py -k exports",
        ),
        (
            "interpreted kernels are kept",
            "is_compiled = of_gpus and not call.interpret",
            "is_compiled = of_gpus",
            "tests/transforms/test_kept.py -k interpreted",
        ),
        (
            "operands that a half does not read are left out",
            "jax.jit(whole, keep_unused=True)",
            "jax.jit(whole)",
            "tests/transforms/test_kept.py -k unread",
        ),
    ),
    *of(
        "jax_flash2/_ahead.py",
        (
            "compiled ahead for a GPU that is not here",
            " and device.gpu_is_here()",
            "",
            "tests/transforms/test_ahead.py -k only_where",
        ),
        (
            "Triton's kernels are compiled twice",
            "is_on and _BACKEND in backends and",
            "is_on and",
            "tests/transforms/test_ahead.py -k triton",
        ),
        (
            "what cannot be compiled ahead is an error",
            "lowered.compile()\n    except Exception:",
            "lowered.compile()\n    except KeyError:",
            "tests/transforms/test_ahead.py -k cannot_be_compiled",
        ),
        (
            "an error where Python ends",
            "except RuntimeError:  # Python is ending",
            "except KeyError:",
            "tests/transforms/test_ahead.py -k python_ends",
        ),
        (
            "halves that wait are compiled when Python ends",
            "if threading.main_thread().is_alive():",
            "if True:",
            "tests/transforms/test_ahead.py -k waits_for_no_other",
        ),
        (
            "a half is compiled ahead for every program",
            "if digest in _started or not",
            "if not",
            "tests/transforms/test_ahead.py -k once",
        ),
        (
            "any number of halves wait",
            "_room.acquire(blocking=False)",
            "True",
            "tests/transforms/test_ahead.py -k others_wait",
        ),
        (
            "what was compiled ahead stays",
            "        _let_go(lowered)\n",
            "        pass\n",
            "tests/transforms/test_ahead.py -k nothing_stays",
        ),
        (
            "compiled ahead for several platforms",
            "is_ahead and len(module.platforms) == 1",
            "is_ahead",
            "tests/transforms/test_ahead.py -k several_platforms",
        ),
    ),
]
