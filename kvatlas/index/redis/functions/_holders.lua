-- Holders: the numbers that stand for one incarnation's blocks. k: table of the slot's keys by name (see _slot.lua).

local LOADING_STATE, ACTIVE_STATE, RETIRED_STATE = 'l', 'a', 'r'

-- The active holders have changed. No version is ever used twice, not even by a store that lost its last writes or
-- everything: clients keep the names that they read at a version.
local function change_version(k)
  local time = redis.call('TIME')
  redis.call('HSET', k.meta, 'active', redis.call('HINCRBY', k.meta, 'changes', 1) .. ' ' .. time[1] .. ' ' .. time[2])
end

-- Returns a new holder's number; nil if all are in use, or were until lately.
local function allocate(k, state, worker, reuse_ms)
  local holder, now = nil, now_ms()
  local oldest = redis.call('LINDEX', k.free, 0) -- 3-byte number, then when it was freed
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

-- The holder answers no more; a sweep gives its memory back. O(1).
local function retire_holder(k, holder, worker)
  if holder == '' then
    return
  end
  redis.call('HSET', k.holders, holder, cmsgpack.pack({ RETIRED_STATE, worker, now_ms() }))
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

-- Closes the worker's incarnation: it answers no more, and its messages are not applied.
local function close_worker(k, record, worker)
  retire_holder(k, record[ACTIVE], worker)
  retire_holder(k, record[LOADING], worker)
  record[ACTIVE], record[LOADING], record[BAD], record[CLOSED] = '', '', 1, 1
end

-- Returns {holder -> is it retired now} of packed holders.
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
