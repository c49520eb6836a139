-- Shared by the functions of the index: the keys of a shard, which are all in one slot (kva:{s<k>}:*), and their formats.
--
--   blocks:<scope id>   HASH  8-byte sequence hash -> holders value: entries of 4 bytes, sorted by holder:
--                             holder number (24 bits, big-endian), flags (bits 0-4 tiers, others 0)
--   holders             HASH  3-byte number -> cmsgpack {state, worker id, since ms}; state l(oading) a(ctive) r(etired); a
--                             retired one's list ends with the ms at which it became active
--   active              HASH  3-byte number -> worker id of each active holder
--   retired             SET   3-byte numbers of the retired holders
--   free                LIST  numbers that can be used again, freed earliest first: 3-byte number, ms at which it was freed
--   marked              HASH  3-byte number of each holder with marks -> dropped (a byte), cmsgpack digest of marks
--   marks:<scope id>    HASH  8-byte sequence hash of a marked block -> 3-byte numbers, sorted; 9 bytes (sequence hash of a
--                             head, 'h') -> sorted entries of 11 bytes: number, 64 bits (big-endian, offset 0 lowest)
--   digests             HASH  3-byte number -> cmsgpack {count, low sum, high sum} for each tier, flat
--   touched             HASH  3-byte number -> 16 bytes for each scope that it used: scope id, tier 0 (a byte), block size (u24
--                             BE), block bytes (u32 BE); then the same for each tier with other block bytes
--   held                HASH  3-byte number, scope id, tier (a byte) -> how many blocks the holder has there; no field for 0
--   moments             HASH  field of held -> what to subtract because the holder had fewer blocks before: its block-ms
--                             since it became active are blocks x (ms active) - moment
--   spent               HASH  scope id, tier (a byte) -> byte-ms of holders that no longer have a block of it
--   workers             HASH  worker id -> cmsgpack record (below)
--   steps               HASH  worker id -> incarnation (8 bytes), then "<seq> <steps>": how much of the worker's next message
--                             is applied, if it comes in parts
--   partitions          HASH  partition -> "<stream creation us> <stream seq>"
--   pinned              SET   3-byte number of each holder with blocks that were put as pinned
--   pinned:<number>     SET   for such a holder (number in hex): scope id, tier (a byte), sequence hash
--   meta                HASH  next: the last number given out; active: the version of the active holders; changes: how many
--                             versions there have been
--   children, parents:<scope id>  HASHes of the side index, if it is on: hash ('': roots) -> packed hashes of the blocks that
--                             follow it, and hash -> hash of the block before it
--
-- record: incarnation, seq, active holder, loading holder ('': none), bad, closed, out of memory (1 or 0 each), incarnation and
--   seq of the highest message that could not be applied, chunks of the running snapshot, partition. StoredRecord in
--   kvatlas/index/redis/records.py has the same fields.
--
-- Incarnations are 8 big-endian bytes: a Lua number can't hold 64 bits.

local TIER_MASK = 31
local MAX_HOLDER = 16777215
local DIGEST_WORDS = 15
local CHUNK = 3500 -- unpack fails with 8,000 values, and HSET takes two for each block
local MOST_SCOPES, MOST_LIST = 16384, 4194304 -- scopes that a call of an indexer names, and bytes of their list
local TWO32 = 4294967296
local SCOPE_COST = 4 -- budget cost of a scope in a sweep
local SCAN_COST = 8 -- budget cost of one HSCAN: it looks at up to ten empty buckets for each field it is asked for

local INCARNATION, SEQ, ACTIVE, LOADING, BAD, CLOSED, OOM = 1, 2, 3, 4, 5, 6, 7 -- the fields of a record
local WANT_INCARNATION, WANT_SEQ, CHUNKS, PARTITION = 8, 9, 10, 11
local NO_INCARNATION = '\0\0\0\0\0\0\0\0'

local function new_record(partition)
  return { NO_INCARNATION, -1, '', '', 0, 0, 0, NO_INCARNATION, -1, 0, partition }
end

-- Returns how many steps of this message have already been applied according to the stored entry; 0 if the entry is about a
-- different message. See kvatlas/index/redis/call_plan.py.
local function steps_applied(stored, incarnation, seq)
  if not stored or string.sub(stored, 1, 8) ~= incarnation then
    return 0
  end
  local stored_seq, steps = string.match(stored, '^(%d+) (%d+)$', 9)
  return tonumber(stored_seq) == seq and tonumber(steps) or 0
end

-- Returns true if the 8-byte incarnation a is below b. Lua's own comparison of strings depends on the locale.
local function below(a, b)
  local a_high, a_low = struct.unpack('>I4I4', a)
  local b_high, b_low = struct.unpack('>I4I4', b)
  return a_high < b_high or (a_high == b_high and a_low < b_low)
end

-- Returns the values of the first `n` fields of this list in their order, thousands in one command.
local function read_values(key, fields, n)
  if n <= CHUNK then
    return redis.call('HMGET', key, unpack(fields, 1, n))
  end
  local found = {}
  for first = 1, n, CHUNK do
    local last = math.min(first + CHUNK - 1, n)
    local values = redis.call('HMGET', key, unpack(fields, first, last))
    for i = first, last do
      found[i] = values[i - first + 1]
    end
  end
  return found
end

-- Returns the values of fields, by field.
local function read_fields(key, fields)
  local found, values = {}, #fields > 0 and read_values(key, fields, #fields) or {}
  for i = 1, #fields do
    found[fields[i]] = values[i]
  end
  return found
end

-- Writes {field, value, field, value...}; thousands in one command.
local function write_fields(key, flat)
  for first = 1, #flat, 2 * CHUNK do
    redis.call('HSET', key, unpack(flat, first, math.min(first + 2 * CHUNK - 1, #flat)))
  end
end

local function now_ms()
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end

-- Returns the identity of this server and its data; it changes with a failover, a restart, or a full copy of another server's
-- data.
local function server_id()
  local info = redis.call('INFO', 'server', 'replication')
  return (string.match(info, 'run_id:(%x+)') or '') .. (string.match(info, 'master_replid:(%x+)') or '')
end

local function number_of(holder)
  local a, b, c = string.byte(holder, 1, 3)
  return (a * 256 + b) * 256 + c
end

local function holder_bytes(number)
  return string.char(math.floor(number / 65536), math.floor(number / 256) % 256, number % 256)
end

-- Splits packed hashes into a table of 8-byte strings with few C calls.
local formats = {}
local function split(packed)
  local count, out = #packed / 8, {}
  local first = 0
  while first < count do
    local n = math.min(count - first, CHUNK)
    local format = formats[n]
    if not format then
      format = string.rep('c8', n)
      if n <= 64 then
        formats[n] = format
      end
    end
    if first == 0 and n == count then
      out = { struct.unpack(format, packed) }
      out[n + 1] = nil -- struct.unpack returns the next position too
    else
      local part = { struct.unpack(format, packed, first * 8 + 1) }
      for i = 1, n do
        out[first + i] = part[i]
      end
    end
    first = first + n
  end
  return out
end

-- Returns the entries of a holders value as numbers (holder number * 256 + flags), and how many there are. If the last entry is
-- incomplete, it is left out.
local function entries_of(value)
  local count, out = math.floor(#value / 4), {}
  for first = 0, count - 1, CHUNK do
    local n = math.min(count - first, CHUNK)
    local part = { struct.unpack('>' .. string.rep('I4', n), value, first * 4 + 1) }
    part[n + 1] = nil -- struct.unpack returns the next position too
    if n == count then
      return part, count
    end
    for i = 1, n do
      out[first + i] = part[i]
    end
  end
  return out, count
end

-- Returns how many fields a scan should ask for next: as many as the rest of the budget allows, judging by the cost of the
-- fields seen so far. The first scan asks for one field, since a value may have an entry for every worker.
local FIRST_FIELDS, MOST_FIELDS = 1, 16
local function fields_to_scan(seen, cost, budget)
  if seen == 0 then
    return FIRST_FIELDS
  end
  return math.max(1, math.min(MOST_FIELDS, math.floor((budget - cost) * seen / cost)))
end

-- Returns the byte position of a holder's entry in a holders value. If there is none, nil and the position where it belongs.
local function find_entry(value, holder)
  local at = string.find(value, holder, 1, true)
  while at and at % 4 ~= 1 do
    at = string.find(value, holder, at + 1, true)
  end
  if at then
    return at
  end
  local number = number_of(holder)
  local low, high = 0, #value / 4
  while low < high do
    local middle = math.floor((low + high) / 2)
    local a, b, c = string.byte(value, middle * 4 + 1, middle * 4 + 3)
    if (a * 256 + b) * 256 + c < number then
      low = middle + 1
    else
      high = middle
    end
  end
  return nil, low * 4 + 1
end

-- Unpacks the words of a stored digest. If they can't be read, returns words that no holder can have, so that the next
-- checkpoint or scrub finds them to be wrong and a snapshot follows.
local function unpack_words(packed, count)
  local good, words = pcall(cmsgpack.unpack, packed)
  good = good and type(words) == 'table' and #words == count
  for i = 1, good and count or 0 do
    good = good and type(words[i]) == 'number'
  end
  if not good then
    words = { 1 }
    for i = 2, count do
      words[i] = 0
    end
  end
  return words
end

-- Unpacks a stored digest; `packed` is false if nothing is stored.
local function digest_of(packed)
  return packed and unpack_words(packed, DIGEST_WORDS) or { 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0 }
end

local function read_digest(key, holder)
  return digest_of(redis.call('HGET', key, holder))
end

-- Returns the two odd 20-bit multipliers that mix a scope into a digest; a product with 32 bits is exact in a double.
local function mix_of(scope_id)
  local low, high = struct.unpack('<I4I4', scope_id)
  return low % 1048576 - low % 2 + 1, high % 1048576 - high % 2 + 1
end
