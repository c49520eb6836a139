-- usage_merge: adds what these scopes spent to one sum without names.
--
-- KEYS 1 spent
-- ARGV scope ids
-- returns 0
local NAMELESS = '\0\0\0\0\0\0\0\0'

register('kvatlas_usage_merge', function(keys, args)
  for _, scope_id in ipairs(args) do
    for tier = 0, 4 do
      local field = scope_id .. string.char(tier)
      local byte_ms = scope_id ~= NAMELESS and redis.call('HGET', keys[1], field)
      if byte_ms then
        redis.call('HINCRBYFLOAT', keys[1], NAMELESS .. string.char(tier), byte_ms)
        redis.call('HDEL', keys[1], field)
      end
    end
  end
  return 0
end, 256)
