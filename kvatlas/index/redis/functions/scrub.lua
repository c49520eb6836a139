-- Comparing blocks with digests: see kvatlas/index/redis/scrub.py and recount.py.

-- Returns a worker's state at this moment: {incarnation, seq, active holder, the holder's digest, 1 if the holder's own entries
-- name this worker, otherwise 0, steps of the next message that are applied, 1 if the holder has marks, otherwise 0}
-- (HolderState in kvatlas/index/redis/records.py), and the active holder; false without one.
-- k: {workers, holders, active, digests, steps, marked = keys}
local function state_of(k, worker)
  local packed = redis.call('HGET', k.workers, worker)
  local record = packed and cmsgpack.unpack(packed)
  if not record or record[ACTIVE] == '' then
    return false
  end
  local holder = record[ACTIVE]
  local entry = redis.call('HGET', k.holders, holder)
  local registered = 0
  if entry then
    local state, owner = unpack(cmsgpack.unpack(entry))
    if state == ACTIVE_STATE and owner == worker and redis.call('HGET', k.active, holder) == worker then
      registered = 1
    end
  end
  local steps = steps_applied(redis.call('HGET', k.steps, worker), record[INCARNATION], record[SEQ] + 1)
  local marked = redis.call('HEXISTS', k.marked, holder)
  return { record[INCARNATION], record[SEQ], holder, read_digest(k.digests, holder), registered, steps, marked }, holder
end

-- what a worker's state costs, a block, each entry of a value that was not met before, each that is told, and each other number
local STATE_COST, SCRUB_BLOCK, SCRUB_ENTRY, SCRUB_FOUND, SCRUB_OTHER = 5, 1, 0.1, 0.3, 0.5

-- Takes a holders value apart. mine: {number of a holder -> its worker's index, a byte}. Returns what is mine of it (a worker's
-- index and flags, 2 bytes; flags 0 if this is no holders value: entries of 4 bytes, sorted, none twice), and the others' numbers.
local function part_of(value, mine)
  local entries, count = entries_of(value)
  local found, others, right, before = {}, {}, #value % 4 == 0, -1
  if #value % 4 == 3 then
    entries[count + 1] = number_of(string.sub(value, -3)) * 256 -- torn
  end
  for _, entry in ipairs(entries) do
    local flags = entry % 256
    local number = (entry - flags) / 256
    right = right and number > before
    before = number
    if mine[number] then
      found[#found + 1] = mine[number] .. string.char(flags)
    else
      others[#others + 1] = number
    end
  end
  for i = 1, right and 0 or #found do
    found[i] = string.sub(found[i], 1, 1) .. '\0'
  end
  return found, others
end

-- scrub: what some workers' active holders have in a part of one scope's blocks, and the workers' states at that moment.
--
-- KEYS 1 blocks of the scope
--      2 workers
--      3 holders
--      4 active
--      5 digests
--      6 steps
--      7 marked
-- ARGV 1 server on which the scrub began ('': here)
--      2 cursor
--      3 budget: the cost of what is looked at
--      4... workers
-- returns msgpack {server, next cursor, cost, {state or false...}, found, {hash...}}; on another server, where the cursor means
--   nothing, {server} alone
--   state: see state_of
--   found: 10 bytes for each entry: hash, the worker's index (from 0), flags (0 if the value is no holders value)
--   hashes: of blocks with an entry of an unknown number, or with none at all
register_read_only('kvatlas_scrub', function(keys, args)
  local blocks, began_on, cursor, budget, server = keys[1], args[1], args[2], tonumber(args[3]), server_id()
  if began_on ~= '' and began_on ~= server then
    return cmsgpack.pack({ server })
  end
  local k = { workers = keys[2], holders = keys[3], active = keys[4], digests = keys[5], steps = keys[6], marked = keys[7] }
  local states, mine = {}, {} -- mine: {number of an active holder -> its worker's index, a byte}
  for i = 4, #args do
    local state, holder = state_of(k, args[i])
    states[i - 3] = state
    if state then
      mine[number_of(holder)] = string.char(i - 4)
    end
  end
  local found, n, strays, blocks_seen, cost = {}, 0, {}, 0, STATE_COST * (#args - 3)
  local parted, others, numbers = {}, {}, {} -- values repeat: each is taken apart once
  repeat
    local flat
    cursor, flat = unpack(redis.call('HSCAN', blocks, cursor, 'COUNT', fields_to_scan(blocks_seen, cost, budget)))
    cost = cost + SCAN_COST + SCRUB_BLOCK * #flat / 2
    blocks_seen = blocks_seen + #flat / 2
    for i = 1, #flat, 2 do
      local hash, value = flat[i], flat[i + 1]
      local entry = parted[value]
      if not entry then
        entry = { hashes = {} }
        entry.mine, entry.others = part_of(value, mine)
        parted[value] = entry
        cost = cost + SCRUB_ENTRY * #value / 4
        for _, number in ipairs(entry.others) do
          if not others[number] then
            others[number] = true
            numbers[#numbers + 1] = holder_bytes(number)
            cost = cost + SCRUB_OTHER
          end
        end
      end
      entry.hashes[#entry.hashes + 1] = hash
      cost = cost + SCRUB_FOUND * #entry.mine
      for _, told in ipairs(entry.mine) do
        n = n + 1
        found[n] = hash .. told
      end
    end
  until cursor == '0' or cost >= budget
  local any_unknown = false
  for first = 1, #numbers, CHUNK do
    local last = math.min(first + CHUNK - 1, #numbers)
    local entries = redis.call('HMGET', k.holders, unpack(numbers, first, last))
    for i = first, last do
      if not entries[i - first + 1] then
        others[number_of(numbers[i])] = 'unknown'
        any_unknown = true
      end
    end
  end
  for value, entry in pairs(parted) do
    local stray = value == '' or #value % 4 == 1 or #value % 4 == 2
    for _, number in ipairs(any_unknown and entry.others or {}) do
      stray = stray or others[number] == 'unknown'
    end
    for _, hash in ipairs(stray and entry.hashes or {}) do
      strays[#strays + 1] = hash
    end
  end
  return cmsgpack.pack({ server, cursor, math.ceil(cost), states, table.concat(found), strays })
end)

-- look: what a worker's active holder has of single blocks, and the worker's state at that moment.
--
-- KEYS 1 workers
--      2 holders
--      3 active
--      4 digests
--      5 steps
--      6 marked
--      7... blocks of each scope
-- ARGV 1 worker
--      2... packed hashes of each scope
-- returns msgpack {server, state or false, {the hashes' flags, a byte each...}}; state: see state_of
register_read_only('kvatlas_look', function(keys, args)
  local k = { workers = keys[1], holders = keys[2], active = keys[3], digests = keys[4], steps = keys[5], marked = keys[6] }
  local state, holder = state_of(k, args[1])
  local flags = {}
  for i = 2, #args do
    local hashes, blocks, seen = split(args[i]), keys[5 + i], {}
    for first = 1, #hashes, CHUNK do
      local last = math.min(first + CHUNK - 1, #hashes)
      local values = redis.call('HMGET', blocks, unpack(hashes, first, last))
      for j = first, last do
        local value = values[j - first + 1]
        local at = state and value and find_entry(value, holder)
        seen[j] = string.char(at and string.byte(value, at + 3) or 0)
      end
    end
    flags[i - 1] = table.concat(seen)
  end
  return cmsgpack.pack({ server_id(), state, flags })
end)

-- doubt: a worker's blocks differ from its digest; only a new incarnation helps. The scopes in which blocks were found are
-- added to those that the holder used, so that the sweep looks there.
--
-- KEYS 1 workers
--      2 touched
-- ARGV 1 worker
--      2 incarnation (8 bytes)
--      3 holder
--      4 server on which the blocks were counted
--      5... scope ids
-- returns 1; 0 if the worker has another incarnation or was cleared meanwhile, or this is another server
register_always('kvatlas_doubt', function(keys, args)
  local workers, touched, worker, incarnation, holder = keys[1], keys[2], args[1], args[2], args[3]
  local packed = redis.call('HGET', workers, worker)
  local record = packed and cmsgpack.unpack(packed)
  if not record or record[INCARNATION] ~= incarnation or record[ACTIVE] ~= holder or args[4] ~= server_id() then
    return 0
  end
  local uses = redis.call('HGET', touched, holder) or ''
  for i = 5, #args do
    local scope_id, known = args[i], false
    for at = 1, #uses, 16 do
      known = known or string.sub(uses, at, at + 7) == scope_id
    end
    if not known then
      uses = uses .. scope_id .. '\0\0\0\0\0\0\0\0'
    end
  end
  redis.call('HSET', touched, holder, uses)
  record[BAD] = 1
  redis.call('HSET', workers, worker, cmsgpack.pack(record))
  return 1
end)

-- strays: takes entries of unknown numbers out of blocks: such a number may be given to a worker one day.
--
-- KEYS 1 blocks of the scope
--      2 holders
--      3 children, 4 parents: only with the side index
-- ARGV hash...
-- returns how many entries it took out
register_always('kvatlas_strays', function(keys, args)
  local blocks, holders, taken = keys[1], keys[2], 0
  local side = keys[3] and { children = keys[3], parents = keys[4] } or nil
  local known = setmetatable({}, {
    __index = function(self, number)
      self[number] = redis.call('HEXISTS', holders, number) == 1
      return rawget(self, number)
    end,
  })
  for i = 1, #args do
    local hash = args[i]
    local value, rest = redis.call('HGET', blocks, hash) or '', {}
    for at = 1, #value, 4 do
      if known[string.sub(value, at, at + 2)] then
        rest[#rest + 1] = string.sub(value, at, at + 3)
      else
        taken = taken + 1
      end
    end
    if #rest == 0 then
      redis.call('HDEL', blocks, hash)
      if side then
        unlink(side, hash)
      end
    elseif #rest * 4 ~= #value then
      redis.call('HSET', blocks, hash, table.concat(rest))
    end
  end
  return taken
end)
