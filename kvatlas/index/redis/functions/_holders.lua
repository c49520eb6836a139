-- Holders: a holder is a number that stands for the blocks of one incarnation of a worker. k: the shard's keys by name (see
-- _slot.lua).

local LOADING_STATE, ACTIVE_STATE, RETIRED_STATE = 'l', 'a', 'r'

-- Returns the fields of a holder's entry (see _slot.lua); nothing if there is no entry or it can't be read.
local function unpack_holder(entry)
  local good, fields = pcall(cmsgpack.unpack, entry)
  return unpack(good and type(fields) == 'table' and fields or {})
end

-- Call this when the active holders have changed. Clients cache names by version, so no version may ever be used twice, not
-- even by a store that lost its last writes or all its data.
local function change_version(k)
  local time = redis.call('TIME')
  redis.call('HSET', k.meta, 'active', redis.call('HINCRBY', k.meta, 'changes', 1) .. ' ' .. time[1] .. ' ' .. time[2])
end

-- Returns the number of a new holder; nil if every number is in use or was freed too recently.
local function allocate(k, state, worker, reuse_ms)
  local now = now_ms()
  local holder
  local oldest = redis.call('LINDEX', k.free, 0) -- 3-byte number, then the ms at which it was freed
  if oldest and now - tonumber(string.sub(oldest, 4)) >= reuse_ms then
    holder = string.sub(oldest, 1, 3)
    redis.call('LPOP', k.free)
  else
    local number = redis.call('HINCRBY', k.meta, 'next', 1)
    if number > MAX_HOLDER then
      redis.call('HINCRBY', k.meta, 'next', -1)
      return nil
    end
    holder = holder_bytes(number)
  end
  redis.call('HSET', k.holders, holder, cmsgpack.pack({ state, worker, now }))
  if state == ACTIVE_STATE then
    redis.call('HSET', k.active, holder, worker)
    change_version(k)
  end
  return holder
end

-- Retires the holder: its blocks are no longer found, and a sweep frees their memory later on. O(1).
local function retire_holder(k, holder, worker)
  if holder == '' then
    return
  end
  local now, entry = now_ms(), redis.call('HGET', k.holders, holder)
  local state, _, since = unpack_holder(entry)
  local active_since = state == ACTIVE_STATE and since or now
  redis.call('HSET', k.holders, holder, cmsgpack.pack({ RETIRED_STATE, worker, now, active_since }))
  if redis.call('HDEL', k.active, holder) == 1 then
    change_version(k)
  end
  redis.call('SADD', k.retired, holder)
end

local function activate_holder(k, holder, worker)
  redis.call('HSET', k.holders, holder, cmsgpack.pack({ ACTIVE_STATE, worker, now_ms() }))
  redis.call('HSET', k.active, holder, worker)
  change_version(k)
end

-- Closes the worker's incarnation: its blocks are no longer found, and its messages no longer applied.
local function close_worker(k, record, worker)
  retire_holder(k, record[ACTIVE], worker)
  retire_holder(k, record[LOADING], worker)
  record[ACTIVE], record[LOADING], record[BAD], record[CLOSED] = '', '', 1, 1
end

-- Returns {holder -> whether it is retired} for packed holders.
local function retired_among(key, packed)
  local holders, retired = {}, {}
  for at = 1, #packed, 3 do
    holders[#holders + 1] = string.sub(packed, at, at + 2)
  end
  for i, found in ipairs(redis.call('SMISMEMBER', key, unpack(holders))) do
    retired[holders[i]] = found == 1
  end
  return retired
end

-- Returns for how many ms each of these holders has been active, or was active before it was retired.
local function spans_of(key, holders)
  local now, spans = now_ms(), {}
  for holder, entry in pairs(read_fields(key, holders)) do
    local state, _, since, active_since = unpack_holder(entry)
    local from, to = active_since, since
    if state == ACTIVE_STATE then
      from, to = since, now
    end
    from, to = tonumber(from), tonumber(to)
    spans[holder] = from and to and math.max(0, to - from) or 0
  end
  return spans
end
