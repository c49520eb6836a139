-- apply_oom: the same as apply (apply.lua), for a store that is out of memory. Workers whose stores can't be applied are
-- closed, which frees memory; everything else is applied.
register_always('kvatlas_apply_oom', function(keys, args)
  return apply(keys, args, true)
end, 1, MOST_CALL)
