-- The ranges of shards of one precompute stage, which several workers capture together. The job's own lease stays with
-- one worker, the owner of the stage: it opens the board of ranges, seals the manifest when all are done, and closes it.
-- Shards lie on the disk under their own names and appear whole, so that two workers with one range do no harm.
--
--   a range is   where
--   untouched    its number is not below 'next'
--   free         in :free; its worker died or gave it back
--   leased       one or two members of :leases
--   done         its bit in :done is set; it never changes again
--
--   action     from             to
--   take       untouched free   leased
--              leased           leased      a second worker, where nothing else is left and the first is slow
--   beat       leased           leased
--   finish     leased           done
--   give_back  leased           free        stays leased where a second worker has it
--   expire     leased           free        the same; each take does it first
--
-- kd:job:{id}:ranges          hash    fingerprint, shards, size, count, version, home; next, done, token, spent_ms
-- kd:job:{id}:ranges:free     zset    numbers of free ranges, by number
-- kd:job:{id}:ranges:leases   zset    tokens, by the end of the lease
-- kd:job:{id}:ranges:holders  hash    token -> JSON: number, worker, since (ms), sequences
-- kd:job:{id}:ranges:done     string  one bit for each range
--
-- Range n has the shards from n * size to (n + 1) * size, as far as there are any: nothing lists them. Only leased and
-- free ranges take memory, and the bits. A token is a fence: it is given once. The board of a job that is gone expires.
-- Times are milliseconds of this server's clock. Commands are those of Redis 6.2. No cluster: keys are computed.

local KEPT_SECONDS = 7 * 24 * 60 * 60
-- A range is slow that takes this many times the mean of those that are done, and at least so long.
local SLOW, LEAST_SLOW_MS = 2, 10000

local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)
local action, id = ARGV[1], ARGV[2]
local board = 'kd:job:' .. id .. ':ranges'
local PARTS = {board, board .. ':free', board .. ':leases', board .. ':holders', board .. ':done'}
local transitions = {}

local function get(field) return redis.call('HGET', board, field) end

local function is_done(number) return redis.call('GETBIT', board .. ':done', number) == 1 end

local function read_holder(token)
  local text = redis.call('HGET', board .. ':holders', token)
  return text and cjson.decode(text)
end

local function write_holder(token, holder) redis.call('HSET', board .. ':holders', token, cjson.encode(holder)) end

local function list_holders()
  local found = {}
  local flat = redis.call('HGETALL', board .. ':holders')
  for i = 1, #flat, 2 do
    local holder = cjson.decode(flat[i + 1])
    holder.token = flat[i]
    found[#found + 1] = holder
  end
  table.sort(found, function(a, b) return tonumber(a.token) < tonumber(b.token) end)
  return found
end

-- End a lease. The range becomes free, unless it is done or a second worker has it.
local function drop(token)
  local holder = read_holder(token)
  redis.call('ZREM', board .. ':leases', token)
  redis.call('HDEL', board .. ':holders', token)
  if not holder or is_done(holder.number) then return end
  for _, other in ipairs(list_holders()) do
    if other.number == holder.number then return end
  end
  redis.call('ZADD', board .. ':free', holder.number, holder.number)
end

local function expire()
  for _, token in ipairs(redis.call('ZRANGEBYSCORE', board .. ':leases', '-inf', now)) do drop(token) end
end

-- Whether the job captures now. A job that pauses, ends or waits for an owner hands out nothing.
local function is_open()
  local status, stage = unpack(redis.call('HMGET', 'kd:job:' .. id, 'status', 'stage'))
  return status == 'running' and stage == 'precompute' and redis.call('EXISTS', board) == 1
end

local function owns(fence)
  local status, stage, held = unpack(redis.call('HMGET', 'kd:job:' .. id, 'status', 'stage', 'fence'))
  return status == 'running' and stage == 'precompute' and held == fence
end

local function keep()
  for _, name in ipairs(PARTS) do redis.call('EXPIRE', name, KEPT_SECONDS) end
end

local function lease(number, worker, ms)
  local token = string.format('%.0f', redis.call('HINCRBY', board, 'token', 1))
  redis.call('ZADD', board .. ':leases', now + ms, token)
  write_holder(token, {number = number, worker = worker, since = now, sequences = 0})
  keep()
  local size, shards = tonumber(get('size')), tonumber(get('shards'))
  local first = number * size
  return {'range', tostring(number), token, tostring(first), tostring(math.min(first + size, shards))}
end

-- The range of the slowest worker, where it is slow and nobody else has it.
local function find_slow(worker)
  local done = tonumber(get('done'))
  if done == 0 then return end
  local limit = math.max(SLOW * tonumber(get('spent_ms')) / done, LEAST_SLOW_MS)
  local holders, times = list_holders(), {}
  for _, holder in ipairs(holders) do times[holder.number] = (times[holder.number] or 0) + 1 end
  for _, holder in ipairs(holders) do
    local slow = now - holder.since > limit and times[holder.number] == 1
    if slow and holder.worker ~= worker and not is_done(holder.number) then return holder.number end
  end
end

-- open(id, fence, fingerprint, shards, size, version, home) -> opened | kept | fenced: kept is the board of an owner
-- before this one, with its leases.
function transitions.open(fence, fingerprint, shards, size, version, home)
  if not owns(fence) then return 'fenced' end
  local old = redis.call('HMGET', board, 'fingerprint', 'shards', 'size', 'version', 'home')
  local same = old[1] == fingerprint and old[2] == shards and old[3] == size and old[4] == version and old[5] == home
  if not same then
    -- Tokens go on, so that a worker of the board before cannot hold a range of this one.
    local token = get('token') or '0'
    redis.call('DEL', unpack(PARTS))
    redis.call('HSET', board, 'fingerprint', fingerprint, 'shards', shards, 'size', size, 'version', version,
      'home', home, 'count', math.ceil(shards / size), 'next', 0, 'done', 0, 'spent_ms', 0, 'token', token)
  end
  keep()
  return same and 'kept' or 'opened'
end

-- close(id, fence) -> closed | fenced
function transitions.close(fence)
  if not owns(fence) then return 'fenced' end
  redis.call('DEL', unpack(PARTS))
  return 'closed'
end

-- take(id, worker, version, home, lease_ms) -> range number token first stop | wait | done | stop
--   | version theirs | home theirs
function transitions.take(worker, version, home, ms)
  if not is_open() then return {'stop'} end
  if version ~= get('version') then return {'version', get('version')} end
  if home ~= get('home') then return {'home', get('home')} end
  expire()
  local free = redis.call('ZPOPMIN', board .. ':free')[1]
  if free then return lease(tonumber(free), worker, ms) end
  local number, count = tonumber(get('next')), tonumber(get('count'))
  if number < count then
    redis.call('HINCRBY', board, 'next', 1)
    return lease(number, worker, ms)
  end
  if tonumber(get('done')) == count then return {'done'} end
  local slow = find_slow(worker)
  if slow then return lease(slow, worker, ms) end
  return {'wait'}
end

-- beat(id, token, lease_ms, sequences) -> go | done | stop | fenced: done means that a second worker was faster, stop
-- that the job captures no more. Neither ends the lease but the end of the range.
function transitions.beat(token, ms, sequences)
  local holder = read_holder(token)
  if not holder or tonumber(redis.call('ZSCORE', board .. ':leases', token)) <= now then return 'fenced' end
  if is_done(holder.number) then
    drop(token)
    return 'done'
  end
  redis.call('ZADD', board .. ':leases', now + ms, token)
  holder.sequences = tonumber(sequences)
  write_holder(token, holder)
  return is_open() and 'go' or 'stop'
end

-- finish(id, token) -> go | done | fenced: all shards of the range are on the disk. A job that pauses takes it too.
function transitions.finish(token)
  local holder = read_holder(token)
  if not holder or tonumber(redis.call('ZSCORE', board .. ':leases', token)) <= now then return 'fenced' end
  local before = redis.call('SETBIT', board .. ':done', holder.number, 1)
  drop(token)
  if before == 1 then return 'done' end
  redis.call('HINCRBY', board, 'done', 1)
  redis.call('HINCRBY', board, 'spent_ms', now - holder.since)
  keep()
  return 'go'
end

-- give_back(id, token) -> go | fenced
function transitions.give_back(token)
  if not read_holder(token) then return 'fenced' end
  drop(token)
  return 'go'
end

-- view(id) -> {} | count, done, spent_ms, then number, worker, ms, sequences of each lease of a range that is not done
function transitions.view()
  if redis.call('EXISTS', board) == 0 then return {} end
  local found = redis.call('HMGET', board, 'count', 'done', 'spent_ms')
  local held = {}
  for _, holder in ipairs(list_holders()) do
    local holds = tonumber(redis.call('ZSCORE', board .. ':leases', holder.token)) > now
    if holds and not is_done(holder.number) then
      for _, value in ipairs({holder.number, holder.worker, now - holder.since, holder.sequences}) do
        held[#held + 1] = tostring(value)
      end
    end
  end
  for _, value in ipairs(held) do found[#found + 1] = value end
  return found
end

return transitions[action](unpack(ARGV, 3))
