-- Recounting: see kvatlas/index/redis/recount.py.

-- k: {workers, holders, active, digests}
local function state_of(k, worker)
  local packed = redis.call('HGET', k.workers, worker)
  local record = packed and cmsgpack.unpack(packed)
  if not record or record[ACTIVE] == '' then
    return false
  end
  local holder = record[ACTIVE]
  local entry = redis.call('HGET', k.holders, holder)
  entry = entry and cmsgpack.unpack(entry)
  local said = entry and entry[1] == 'a' and entry[2] == worker and redis.call('HGET', k.active, holder) == worker
  return { record[INC], record[SEQ], holder, read_digest(k.digests, holder), said and 1 or 0 }
end

-- Are these entries of 4 bytes, sorted, none twice?
local function well_formed(value)
  local before = -1
  for at = 1, #value, 4 do
    local number = #value - at >= 3 and number_of(string.sub(value, at, at + 2)) or -1
    if number <= before then
      return false
    end
    before = number
  end
  return true
end

-- scrub: what a part of one scope's blocks says that some workers' active holders hold, and the workers' state at that moment.
-- KEYS: blocks of the scope, workers, holders, active, digests   ARGV: cursor, count, worker...
-- returns msgpack {next cursor, {state or false...}, found, {hash...}}
--   state: {incarnation, seq, active holder, digest, does the holder's own entry say so?}; false: no active holder
--   found: 10 bytes for each entry: hash, the worker's index (from 0), flags; 0 where the value is no holders value
--   hashes: blocks with an entry of a number that is nobody's, or with none at all
redis.register_function({
  function_name = 'kvatlas_scrub',
  callback = function(keys, args)
    local k = { workers = keys[2], holders = keys[3], active = keys[4], digests = keys[5] }
    local states, mine = {}, {}
    for i = 3, #args do
      states[i - 2] = state_of(k, args[i])
      if states[i - 2] then
        mine[states[i - 2][3]] = string.char(i - 3)
      end
    end
    local answer = redis.call('HSCAN', keys[1], args[1], 'COUNT', args[2])
    local flat, found, n = answer[2], {}, 0
    local strays = {}
    local read, others, numbers = {}, {}, {} -- values repeat: each is taken apart once
    for i = 1, #flat, 2 do
      local hash, value = flat[i], flat[i + 1]
      local parts = read[value]
      if not parts then
        parts = { mine = {}, others = {} }
        local right = well_formed(value)
        for at = 1, #value, 4 do
          local number = string.sub(value, at, at + 2)
          if mine[number] then
            parts.mine[#parts.mine + 1] = mine[number] .. string.char(right and string.byte(value, at + 3) or 0)
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
      if value == '' then
        strays[#strays + 1] = hash
      end
      for _, entry in ipairs(parts.mine) do
        n = n + 1
        found[n] = hash .. entry
      end
    end
    local nobodys = false
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

-- look: what a worker's active holder has of single blocks, and the worker's state at that moment.
-- KEYS: workers, holders, active, digests, blocks of each scope   ARGV: worker, packed hashes of each scope
-- returns msgpack {state or false, {flags of the hashes, a byte each...}}: see scrub
redis.register_function({
  function_name = 'kvatlas_look',
  callback = function(keys, args)
    local k = { workers = keys[1], holders = keys[2], active = keys[3], digests = keys[4] }
    local state, flags = state_of(k, args[1]), {}
    for i = 2, #args do
      local hashes, seen = split(args[i]), {}
      for first = 1, #hashes, CHUNK do
        local last = math.min(first + CHUNK - 1, #hashes)
        local values = redis.call('HMGET', keys[3 + i], unpack(hashes, first, last))
        for j = first, last do
          local value = values[j - first + 1]
          local at = state and value and find_entry(value, state[3])
          seen[j] = string.char(at and string.byte(value, at + 3) or 0)
        end
      end
      flags[i - 1] = table.concat(seen)
    end
    return cmsgpack.pack({ state, flags })
  end,
  flags = { 'no-writes' },
})

-- doubt: a worker's blocks are not those of its digest: only a new incarnation helps. Where blocks were found is remembered,
-- so that the sweep looks there.
-- KEYS: workers, touched   ARGV: worker, incarnation, holder, scope id...
-- returns 1, or 0 where it tells another incarnation or has cleared its cache meanwhile
redis.register_function({
  function_name = 'kvatlas_doubt',
  callback = function(keys, args)
    local packed = redis.call('HGET', keys[1], args[1])
    local record = packed and cmsgpack.unpack(packed)
    if not record or record[INC] ~= args[2] or record[ACTIVE] ~= args[3] then
      return 0
    end
    local touched = redis.call('HGET', keys[2], args[3]) or ''
    for i = 4, #args do
      local known = false
      for at = 1, #touched, 16 do
        known = known or string.sub(touched, at, at + 7) == args[i]
      end
      if not known then
        touched = touched .. args[i] .. '\0\0\0\0\0\0\0\0'
      end
    end
    redis.call('HSET', keys[2], args[3], touched)
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
