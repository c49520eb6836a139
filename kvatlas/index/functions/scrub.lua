-- scrub: what a part of one scope's blocks says that some workers' active holders hold, and the workers' state at that moment.
-- KEYS: blocks of the scope, workers, holders, active, digests   ARGV: cursor, count, worker...
-- returns msgpack {next cursor, {state or false...}, found, {hash...}}
--   state: {incarnation, seq, active holder, digest, does the holder's own entry say so?}; false: no active holder
--   found: 10 bytes for each entry: hash, the worker's index (from 0), flags
--   hashes: blocks with an entry of a number that is nobody's
redis.register_function({
  function_name = 'kvatlas_scrub',
  callback = function(keys, args)
    local states, mine = {}, {}
    for i = 3, #args do
      local packed = redis.call('HGET', keys[2], args[i])
      local record = packed and cmsgpack.unpack(packed)
      states[i - 2] = false
      if record and record[ACTIVE] ~= '' then
        local holder = record[ACTIVE]
        local entry = redis.call('HGET', keys[3], holder)
        entry = entry and cmsgpack.unpack(entry)
        local said = entry and entry[1] == 'a' and entry[2] == args[i] and redis.call('HGET', keys[4], holder) == args[i]
        states[i - 2] = { record[INC], record[SEQ], holder, read_digest(keys[5], holder), said and 1 or 0 }
        mine[holder] = string.char(i - 3)
      end
    end
    local answer = redis.call('HSCAN', keys[1], args[1], 'COUNT', args[2])
    local flat, found, n = answer[2], {}, 0
    local read, others, numbers = {}, {}, {} -- values repeat: each is taken apart once
    for i = 1, #flat, 2 do
      local hash, value = flat[i], flat[i + 1]
      local parts = read[value]
      if not parts then
        parts = { mine = {}, others = {} }
        for at = 1, #value, 4 do
          local number = string.sub(value, at, at + 2)
          if mine[number] then
            parts.mine[#parts.mine + 1] = mine[number] .. string.char(string.byte(value, at + 3) or 0) -- or torn
          else
            parts.others[#parts.others + 1] = number
            if not others[number] then
              others[number] = true
              numbers[#numbers + 1] = number
            end
          end
        end
        read[value] = parts
      end
      for _, entry in ipairs(parts.mine) do
        n = n + 1
        found[n] = hash .. entry
      end
    end
    local nobodys, strays = false, {}
    for first = 1, #numbers, CHUNK do
      local last = math.min(first + CHUNK - 1, #numbers)
      local entries = redis.call('HMGET', keys[3], unpack(numbers, first, last))
      for i = first, last do
        if not entries[i - first + 1] then
          others[numbers[i]] = 'nobody'
          nobodys = true
        end
      end
    end
    if nobodys then
      for i = 1, #flat, 2 do
        for _, number in ipairs(read[flat[i + 1]].others) do
          if others[number] == 'nobody' then
            strays[#strays + 1] = flat[i]
            break
          end
        end
      end
    end
    return cmsgpack.pack({ answer[1], states, table.concat(found), strays })
  end,
  flags = { 'no-writes' },
})

-- doubt: a worker's blocks are not those of its digest: only a new incarnation helps. Where blocks were found is remembered,
-- so that the sweep looks there.
-- KEYS: workers, touched   ARGV: worker, incarnation, seq, holder, scope id...
-- returns 1, or 0 where the worker went on meanwhile
redis.register_function({
  function_name = 'kvatlas_doubt',
  callback = function(keys, args)
    local packed = redis.call('HGET', keys[1], args[1])
    local record = packed and cmsgpack.unpack(packed)
    if not record or record[INC] ~= args[2] or record[SEQ] ~= tonumber(args[3]) or record[ACTIVE] ~= args[4] then
      return 0
    end
    local touched = redis.call('HGET', keys[2], args[4]) or ''
    for i = 5, #args do
      local known = false
      for at = 1, #touched, 16 do
        known = known or string.sub(touched, at, at + 7) == args[i]
      end
      if not known then
        touched = touched .. args[i] .. '\0\0\0\0\0\0\0\0'
      end
    end
    redis.call('HSET', keys[2], args[4], touched)
    record[BAD] = 1
    redis.call('HSET', keys[1], args[1], cmsgpack.pack(record))
    return 1
  end,
  flags = { 'allow-oom' },
})

-- strays: takes entries of numbers that are nobody's out of blocks: such a number may be given to a worker one day.
-- KEYS: blocks of the scope, holders [, children, parents]   ARGV: hash...   returns the entries taken out
redis.register_function({
  function_name = 'kvatlas_strays',
  callback = function(keys, args)
    local taken = 0
    for i = 1, #args do
      local value, rest = redis.call('HGET', keys[1], args[i]) or '', {}
      for at = 1, #value, 4 do
        if redis.call('HEXISTS', keys[2], string.sub(value, at, at + 2)) == 1 then
          rest[#rest + 1] = string.sub(value, at, at + 3)
        else
          taken = taken + 1
        end
      end
      if #rest == 0 then
        redis.call('HDEL', keys[1], args[i])
        if keys[3] then
          unlink({ children = keys[3], parents = keys[4] }, args[i])
        end
      elseif #rest * 4 ~= #value then
        redis.call('HSET', keys[1], args[i], table.concat(rest))
      end
    end
    return taken
  end,
  flags = { 'allow-oom' },
})
