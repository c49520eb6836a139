-- held: finds out which of these scopes have blocks or marks in this shard.
--
-- KEYS blocks and marks of each scope
-- ARGV scope ids
-- returns {scope id...}
register_read_only('kvatlas_held', function(keys, args)
  local held = {}
  for i = 1, #args do
    if redis.call('EXISTS', keys[2 * i - 1], keys[2 * i]) > 0 then
      held[#held + 1] = args[i]
    end
  end
  return held
end, 256)
