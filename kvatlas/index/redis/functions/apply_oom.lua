-- apply_oom: apply (apply.lua) for a store without memory. A worker whose stores can't be applied is closed, which gives memory back;
-- all else is applied.
register_always('kvatlas_apply_oom', function(keys, args)
  return apply(keys, args, true)
end)
