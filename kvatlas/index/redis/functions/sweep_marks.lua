-- sweep_marks: takes retired holders out of one scope's marks, a part at a time.
--
-- KEYS 1 marks of the scope
--      2 retired
--      3 marked
-- ARGV 1 scope id
--      2 cursor
--      3 count
--      4... holders
-- returns {next cursor, entries taken out, the server's run id: a cursor means nothing to another server}
redis.register_function({
  function_name = 'kvatlas_sweep_marks',
  callback = function(keys, args)
    local key, retired, marked = keys[1], keys[2], keys[3]
    local scope_id, cursor, count = args[1], args[2], args[3]
    local scope, holders, marks_by_holder = {}, {}, {}
    scope.mix_low, scope.mix_high = mix_of(scope_id)
    for i = 4, #args do
      local holder = args[i]
      if redis.call('SISMEMBER', retired, holder) == 1 then
        local packed = redis.call('HGET', marked, holder)
        holders[#holders + 1] = holder
        marks_by_holder[holder] = packed and unpack_marks(packed) or nil
      end
    end
    local next_cursor, flat = unpack(redis.call('HSCAN', key, cursor, 'COUNT', count))
    local taken = 0
    for i = 1, #flat, 2 do
      local field, value = flat[i], flat[i + 1]
      local size = #field == 8 and MARK or HEAD
      local rest = value
      for j = 1, #holders do
        local holder = holders[j]
        local at = find_sized(rest, holder, size)
        if at then
          local marks = marks_by_holder[holder]
          if marks and size == MARK then
            count_blocks(marks.words, 0, field, scope, -1)
          elseif marks then
            count_head(marks.words, field, string.sub(rest, at + 3, at + 10), scope, -1)
          end
          rest = string.sub(rest, 1, at - 1) .. string.sub(rest, at + size)
          taken = taken + 1
        end
      end
      if rest == '' then
        redis.call('HDEL', key, field)
      elseif rest ~= value then
        redis.call('HSET', key, field, rest)
      end
    end
    for holder, marks in pairs(marks_by_holder) do
      redis.call('HSET', marked, holder, pack_marks(marks))
    end
    return { next_cursor, taken, string.match(redis.call('INFO', 'server'), 'run_id:(%x+)') or '' }
  end,
  flags = { 'allow-oom' },
})
